// SPDX-License-Identifier: Apache-2.0
// Which of my runs is ill? Every run of the store with its health, progress, sparkline and findings.

import { announce, fill, h, keyed } from "../dom.js";
import { number } from "../format.js";
import { chosenRuns, compareLink, joined, MOST } from "../parts/chosen.js";
import { HEALTH } from "../parts/health.js";
import { deleteDialog, tagDialog } from "../parts/run_dialogs.js";
import { runRow } from "../parts/run_row.js";
import { nothing } from "../parts/states.js";
import { addressOf } from "../root.js";

export const title = "Runs";
const PAGE = 50;
const WAIT = 150; // ms after the last keystroke
const TICK = 30_000; // ms between two updates of relative times
const COLUMNS = [
  ["health", "health", ""], ["name", "run", ""], ["progress", "progress", ""], [null, "trend", ""], ["accuracy", "accuracy", "num"],
  ["findings", "findings", ""], ["duration", "duration", "num more"], ["bytes", "bytes", "num more"], ["clients", "clients", "num more"],
  ["host", "host", "more"], ["started", "started", "num more"],
];
const DOWN = ["accuracy", "findings", "duration", "bytes", "clients", "progress", "started"]; // largest first, as on the server

export function view(root, ctx) {
  const { params } = ctx;
  let data = null;
  let selected = chosenRuns(params, "selected");
  const filters = filterBar(params);
  const bar = h("div", { class: "row selection", role: "region", "aria-label": "Selection", hidden: true });
  const heads = COLUMNS.map((column) => heading(params, ...column));
  const body = h("tbody", {});
  const table = h("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": "Runs" }, h("table", { class: "data runs" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span", { class: "unseen", text: "select" })), heads.map((one) => one.node), h("th", { scope: "col" }, h("span", { class: "unseen", text: "delete" })))), body));
  const pages = h("nav", { class: "row", "aria-label": "Pages of the list" });
  const none = h("div", {});
  const listed = h("div", { class: "stack" }, filters.node, bar, table, none, pages);
  root.append(listed);

  const acts = {
    select(id, on) {
      if (on && selected.length >= MOST) announce(`At most ${MOST} runs can be compared.`);
      else selected = on ? [...selected, id] : selected.filter((one) => one !== id);
      params.set({ selected: joined(selected) }, { quiet: true });
      for (const row of body.children) row.show(row.run, selected.includes(row.run.id));
      selection();
    },
    tags: (run) => tagDialog(ctx, run, data.tags, () => ctx.refresh()),
    remove: (run) => deleteDialog(ctx, run, (id) => {
      acts.select(id, false);
      ctx.refresh();
    }),
  };

  function selection() {
    bar.hidden = selected.length === 0;
    fill(bar,
      selected.length > 1 ? h("a", { class: "button compare", href: compareLink(selected), text: `Compare ${selected.length} runs` })
        : h("span", { class: "muted", text: "Select one more run to compare." }),
      h("button", { class: "link-button", type: "button", text: "Clear the selection", on: { click: () => [...selected].forEach((id) => acts.select(id, false)) } }));
  }

  function paging() {
    const page = Math.max(1, params.number("page", 1));
    const last = Math.max(1, Math.ceil(data.total / PAGE));
    const to = (wanted, text, rel) => h("button", { class: "button quiet", type: "button", rel, text, disabled: wanted < 1 || wanted > last, on: { click: () => params.set({ page: wanted > 1 ? wanted : null }, { push: true }) } });
    const first = (page - 1) * PAGE;
    fill(pages, last > 1 && [to(page - 1, "← newer", "prev"), h("span", { class: "muted", text: `${number(first + 1)} to ${number(Math.min(first + PAGE, data.total))} of ${number(data.total)}` }), to(page + 1, "older →", "next")]);
    if (params.get("sort")) pages.querySelectorAll("button").forEach((one, at) => (one.textContent = at ? "next →" : "← previous"));
  }

  const tick = setInterval(() => [...body.children].forEach((row) => row.tick?.()), TICK);

  function move(step) {
    const rows = [...body.children];
    const now = rows.indexOf(document.activeElement?.closest?.("tr"));
    const next = rows[now < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.max(0, Math.min(rows.length - 1, now + step))];
    next?.querySelector("a.run-link").focus();
  }
  const labelled = (label, act) => Object.assign(act, { label });

  return {
    load(signal) {
      const asked = Object.fromEntries(["search", "state", "health", "tag", "sort", "order"].map((name) => [name, params.get(name)]));
      const page = Math.max(1, params.number("page", 1));
      return Promise.all([ctx.api.get(addressOf("/api/runs"), { ...asked, limit: PAGE, offset: (page - 1) * PAGE }, signal), ctx.api.get(addressOf("/api/store"), {}, signal)]);
    },

    show([found, store]) {
      data = found;
      selected = chosenRuns(params, "selected");
      if (found.stored === 0) return fill(root, nothing.runs(store.store));
      if (!listed.isConnected) fill(root, listed);
      filters.show(found);
      heads.forEach((one) => one.show());
      keyed(body, found.runs, (run) => run.id, (run) => runRow(run, acts), (row, run) => row.show(run, selected.includes(run.id)));
      table.hidden = found.runs.length === 0;
      fill(none, found.runs.length === 0 && h("p", { class: "empty" }, "No run is like that. ",
        h("a", { href: addressOf("/"), text: "Show all runs" })));
      selection();
      paging();
    },

    restore: () => filters.restore(),
    destroy: () => {
      clearInterval(tick);
      filters.destroy();
    },
    keys: {
      j: labelled("next run", () => move(1)),
      k: labelled("run before", () => move(-1)),
      x: labelled("select the run", () => document.activeElement?.closest?.("tr[data-run]")?.querySelector("input").click()),
      "/": labelled("search", () => filters.focus()),
    },
  };
}

/** A column's heading that sorts by it; a second click reverses it, a third one resets it. */
function heading(params, sort, text, kind) {
  const button = sort && h("button", { type: "button", on: { click: turn } });
  const node = h("th", { class: kind || null, scope: "col" }, button ?? text);
  function now() {
    if (params.get("sort") !== sort) return null;
    return params.get("order") ?? (DOWN.includes(sort) ? "down" : "up");
  }
  function turn() {
    const natural = DOWN.includes(sort) ? "down" : "up";
    const other = natural === "down" ? "up" : "down";
    const at = now();
    params.set(at === null ? { sort, order: null, page: null } : at === natural ? { sort, order: other, page: null } : { sort: null, order: null, page: null }, { push: true });
  }
  return {
    node,
    show() {
      if (!button) return;
      const at = now();
      button.textContent = at === null ? text : `${text} ${at === "down" ? "↓" : "↑"}`;
      if (at === null) node.removeAttribute("aria-sort");
      else node.setAttribute("aria-sort", at === "down" ? "descending" : "ascending");
    },
  };
}

/** Which runs are shown, and in which order. */
function filterBar(params) {
  let typed = null;
  const search = h("input", { class: "field search", type: "search", "aria-label": "Search name, id, tag or host", placeholder: "search name, id, tag, host   /", maxlength: 200, value: params.get("search", ""), on: { input: later } });
  const select = (name, label, options) => {
    const node = h("select", { class: "field", "aria-label": label, on: { change: () => params.set({ [name]: node.value || null, page: null }, { push: true }) } });
    node.offer = (values) => {
      const key = JSON.stringify(values);
      if (node.dataset.offered !== key) fill(node, values.map(([value, text]) => h("option", { value, text })));
      node.dataset.offered = key;
      node.value = params.get(name, "");
    };
    node.offer(options);
    return node;
  };
  const state = select("state", "State", [["", "any state"], ["running", "running"], ["silent", "silent"], ["died", "died"], ["finished", "finished"]]);
  const health = select("health", "Health", [["", "any health"], ...Object.entries(HEALTH).map(([key, [, , word]]) => [key, word])]);
  const tag = select("tag", "Tag", [["", "any tag"]]);
  const worst = h("button", { class: "button quiet", type: "button", text: "worst first", on: { click: () => params.set({ sort: params.get("sort") === "worst" ? null : "worst", order: null, page: null }, { push: true }) } });
  const count = h("span", { class: "muted", role: "status" });
  const node = h("div", { class: "head" }, h("h1", { text: "Runs" }), search, state, health, tag, worst, count);

  function later() {
    clearTimeout(typed);
    typed = setTimeout(() => params.set({ search: search.value.trim() || null, page: null }), WAIT);
  }

  return {
    node,
    focus: () => search.focus(),
    restore: () => (search.value = params.get("search", "")),
    destroy: () => clearTimeout(typed),
    show(found) {
      if (document.activeElement !== search) search.value = params.get("search", "");
      state.value = params.get("state", "");
      health.value = params.get("health", "");
      const asked = params.get("tag");
      tag.offer([["", "any tag"], ...[...new Set([...found.tags, ...(asked ? [asked] : [])])].map((one) => [one, one])]);
      tag.hidden = !found.tags.length && !asked;
      worst.setAttribute("aria-pressed", String(params.get("sort") === "worst"));
      const running = found.running ? `, ${number(found.running)} running` : "";
      count.textContent = found.total === found.stored ? `${number(found.stored)} ${found.stored === 1 ? "run" : "runs"}${running}` : `${number(found.total)} of ${number(found.stored)} runs${running}`;
    },
  };
}
