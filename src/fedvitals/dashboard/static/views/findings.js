// SPDX-License-Identifier: Apache-2.0
// Findings: every trouble of a run once, current ones and worst first. Acknowledge, mute, or open one.

import { of } from "../api.js";
import { sparkline } from "../charts/sparkline.js";
import { fill, h, keyed } from "../dom.js";
import { sure } from "../format.js";
import { go, runLink } from "../params.js";
import { findingMarks, findingTags, severityMark } from "../parts/finding_marks.js";
import { causeLevels } from "../parts/finding_parts.js";
import { empty } from "../parts/states.js";
import { verdictBox } from "../parts/verdict.js";

export const title = "Findings";
const STATES = ["all", "open", "past", "acknowledged", "muted"];
const PAGE = 50;
const MOST = 500;
const PATIENCE = 250; // ms after the last keystroke before a search

export function view(root, ctx) {
  const { run, params } = ctx;
  const verdict = verdictBox();
  const filters = filterRow(ctx);
  const list = h("div", { class: "finding-cards" });
  const rest = h("div", { class: "muted" });
  root.append(h("div", { class: "findings-page" }, verdict.node, filters.node, list, rest));
  const cards = new Map(); // key → marks of that card

  function current() {
    const all = [...list.children];
    const at = all.findIndex((card) => card.contains(document.activeElement));
    return { all, at, key: all[at]?.dataset.key };
  }

  const step = (by) => {
    const { all, at } = current();
    const card = all[at < 0 ? 0 : Math.max(0, Math.min(all.length - 1, at + by))];
    card?.focus();
    card?.scrollIntoView({ block: "nearest" });
  };
  const onCard = (act, label) => Object.assign(() => {
    const { key } = current();
    if (key) act(key);
  }, { label });

  return {
    load(signal) {
      const limit = Math.min(MOST, Math.max(PAGE, params.number("limit", PAGE)));
      const asked = { state: filters.state(), severity: params.get("severity"), node: params.get("node"), search: params.get("search"), limit, notes: params.get("notes") };
      return ctx.api.get(of(run, "findings"), asked, signal);
    },

    show(found) {
      verdict.show(run, found.verdict, found.cases.find((one) => one.key === found.verdict.key)?.severity ?? null);
      filters.show(found);
      keyed(list, found.cases, (one) => one.key, (one) => card(ctx, one, cards), update);
      const left = found.total - found.cases.length;
      fill(rest,
        found.examined && h("p", { class: "examined", text: `Looked at: ${found.examined}.` }),
        (found.notes > 0 || params.get("notes")) && h("button", {
          class: "link-button", text: params.get("notes") ? "Hide notes" : `Show ${found.notes} note${found.notes === 1 ? "" : "s"}`,
          on: { click: () => params.set({ notes: params.get("notes") ? null : "true", limit: null }, { push: true }) },
        }),
        !found.counts.all && nothingFound(found.verdict),
        found.counts.all > 0 && !found.total && ["No finding is like that. ", h("button", { class: "link-button", text: "Show all", on: { click: filters.clear } })],
        left > 0 && h("button", {
          class: "button quiet", text: `${Math.min(left, PAGE)} more of ${left}`,
          on: { click: () => params.set({ limit: found.cases.length + PAGE }) },
        }));
    },

    destroy: filters.destroy,

    keys: {
      j: Object.assign(() => step(1), { label: "next finding" }),
      k: Object.assign(() => step(-1), { label: "finding before" }),
      o: onCard((key) => go(runLink(run, "findings", key)), "open it"),
      a: onCard((key) => cards.get(key).acknowledge(), "acknowledge it"),
      m: onCard((key) => cards.get(key).mute(), "mute it"),
      "/": Object.assign(() => filters.search.focus(), { label: "search" }),
    },
  };
}

function nothingFound(verdict) {
  if (verdict.state === "unjudged") return empty(verdict.headline, "`fedvitals check RUN` judges what the store has.");
  return empty("No finding.", verdict.state === "warming" ? "It is early: they come by themselves." : "Nothing was wrong as far as the detectors could see.");
}

// -- cards ------------------------------------------------------------------------------------------------------------

function card(ctx, one, cards) {
  const marks = findingMarks(ctx);
  cards.set(one.key, marks);
  const told = h("div", { class: "finding-told" });
  const node = h("article", { class: "card finding-card", tabindex: "-1", data: { key: one.key } }, told, marks.node);
  node.marks = marks;
  node.told = told;
  node.href = runLink(ctx.run, "findings", one.key);
  return node;
}

function update(node, one) {
  node.marks.show(one);
  const now = JSON.stringify(one);
  if (node.dataset.now === now) return;
  node.dataset.now = now;
  node.className = `card finding-card edge-${one.severity}${one.follows ? " follows" : ""}${one.muted || !one.still_there ? " dimmed" : ""}`;
  node.setAttribute("aria-label", `${one.severity}: ${one.sentence}`);
  const trend = one.confidences.length > 1 && sparkline(one.confidences, { unit: "share", width: 96, height: 22, label: `confidence, ${sure(one.confidences[0])} to ${one.sure}` });
  fill(node.told,
    h("div", { class: "finding-head" }, severityMark(one), h("span", { class: "muted small", text: one.issue }), one.follows && h("span", { class: "muted small", text: "follows from the one above" }), findingTags(one)),
    h("h2", {}, h("a", { href: node.href, text: one.sentence })),
    h("p", { class: "muted", text: [!repeated(one) && one.title, one.timeline].filter(Boolean).join(" · ") }),
    h("p", { class: "finding-message", text: one.message }),
    causeLevels(one.levels),
    one.alternatives.length > 0 && h("p", { class: "muted small", text: `or ${one.alternatives.map(([issue, chance]) => `${issue[0].toLowerCase()}${issue.slice(1)} ${sure(chance)}`).join(", ")}` }),
    h("div", { class: "finding-sure" }, trend, h("span", { class: "big num", text: one.sure }), h("span", { class: "muted small", text: " sure" })));
}

/** Whether the title would repeat the sentence; a user-defined issue only has its code as a title. */
const repeated = (one) => one.title === one.issue || one.sentence.startsWith(one.title);

// -- filters ----------------------------------------------------------------------------------------------------------

function filterRow(ctx) {
  const { params } = ctx;
  const states = h("div", { class: "segments", role: "group", "aria-label": "Which findings" });
  const severity = h("select", { class: "field", on: { change: () => params.set({ severity: severity.value, limit: null }, { push: true }) } },
    [["", "any severity"], ["critical", "critical"], ["warning", "warning"], ["note", "note"]].map(([value, text]) => h("option", { value, text })));
  const node = field("node", "client or group");
  const search = field("search", "search");
  let waiting = null;

  function field(name, text) {
    const input = h("input", { class: "field", type: "search", placeholder: text, "aria-label": text, maxlength: "200" });
    input.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => params.set({ [name]: input.value.trim(), limit: null }), PATIENCE);
    });
    return input;
  }

  const state = () => (STATES.includes(params.get("state")) ? params.get("state") : "all");
  return {
    node: h("div", { class: "row finding-filters" }, states, h("label", { class: "field-label" }, h("span", { class: "unseen", text: "severity" }), severity), node, search,
      h("span", { class: "muted small sorted", text: "there now first, worst first" })),
    search,
    state,
    clear: () => params.set({ notes: null, state: null, severity: null, node: null, search: null, limit: null }, { push: true }),
    show(found) {
      keyed(states, STATES, (name) => name,
        (name) => h("button", { class: "segment", on: { click: () => params.set({ state: name === "all" ? null : name, limit: null }, { push: true }) } }),
        (button, name) => {
          button.textContent = `${name} ${found.counts[name]}`;
          button.setAttribute("aria-pressed", String(name === state()));
        });
      severity.value = params.get("severity", "");
      for (const [input, name] of [[node, "node"], [search, "search"]]) if (document.activeElement !== input) input.value = params.get(name, "");
    },
    destroy: () => clearTimeout(waiting),
  };
}
