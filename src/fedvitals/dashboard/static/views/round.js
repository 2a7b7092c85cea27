// SPDX-License-Identifier: Apache-2.0
// One round: where did its time go? Every node on one axis, the critical path outlined, who waited for whom.

import { of } from "../api.js";
import { waterfall } from "../charts/index.js";
import { fill, h } from "../dom.js";
import { exactly, number, ordinal, percent, seconds, underTitle } from "../format.js";
import { go, link, runLink } from "../params.js";
import { rowTable } from "../parts/rows.js";

export const title = "Round";
const LANES = 200;
const ROWS = 25;

export function view(root, ctx) {
  const { run, params, path } = ctx;
  const here = Number(path.round);
  const [heading, headline, facts] = [h("h1", {}), h("p", { class: "said" }), h("p", { class: "muted small" })];
  const [steps, controls] = [h("nav", { class: "row", "aria-label": "Other rounds" }), h("div", { class: "row controls" })];
  const [picture, waited, slowest] = [h("div", {}), h("ul", { class: "plain-list" }), h("p", { class: "row" })];
  const more = h("p", { class: "row" });
  const raw = h("p", { class: "row small" });
  const table = rowTable([], { key: (row) => row.node, caption: "Metrics of the round" });
  root.append(
    h("div", { class: "head" }, heading, h("span", { class: "muted", text: "where did its time go?" }), steps),
    headline, facts, controls, picture,
    h("div", { class: "split" },
      h("section", { class: "panel" }, h("h2", { text: "who waited for whom" }), waited),
      h("section", { class: "panel" }, h("h2", { text: "slowest rounds of the run" }), slowest)),
    h("section", { class: "panel" }, h("h2", { text: "metrics by node" }), table.node, more, raw));
  const fall = waterfall(picture, { title: "what every node did", maxHeight: 612, onPart: (lane) => lane?.href && go(lane.href) });
  let neighbours = {};

  const to = (round) => link(runLink(run, "rounds", round), { clock: params.get("clock"), order: params.get("order") });

  function drawHead(found) {
    heading.textContent = `Round ${found.round}`;
    document.title = `Round ${found.round} · ${ctx.status?.name ?? ""} · fedvitals`;
    headline.textContent = found.headline;
    const place = found.place === null ? "" : found.place === 1 ? "the longest" : `the ${ordinal(found.place)} longest`;
    fill(facts, [
      found.seconds === null ? "" : `${seconds(found.seconds)}${place ? `, ${place} of ${number(found.rounds)} rounds` : ""}, on the ${found.clock} clock.`,
      found.timed && !found.complete ? "The round has no end: it failed, or goes on." : "",
      found.unaccounted > 0.02 ? `Up to ${percent(found.unaccounted)} of a node’s round is in no part.` : "",
      found.left_out ? `${found.left_out} spans cannot be true and are left out.` : "",
    ].filter(Boolean).join(" "));
    neighbours = { previous: found.previous, next: found.next };
    fill(steps,
      found.previous === null ? h("span", { class: "muted", text: "← previous" }) : h("a", { href: to(found.previous), rel: "prev", text: `← round ${found.previous}` }),
      found.next === null ? h("span", { class: "muted", text: "next →" }) : h("a", { href: to(found.next), rel: "next", text: `round ${found.next} →` }),
      h("a", { href: link(runLink(run, "topology"), { round: found.round }), text: "topology" }));
    const press = (name, value, text, now) => h("button", { class: "button quiet", type: "button", text, "aria-pressed": String(now), on: { click: () => params.set({ [name]: value }, { push: true }) } });
    fill(controls,
      found.clocks.length > 1 && h("span", { class: "row", role: "group", "aria-label": "Clock" }, found.clocks.map((one) => press("clock", one, `${one} clock`, one === found.clock))),
      found.timed && h("span", { class: "row", role: "group", "aria-label": "Order" },
        press("order", null, "slowest first", params.get("order") !== "name"), press("order", "name", "by name", params.get("order") === "name")));
  }

  function drawFall(found) {
    picture.hidden = !found.timed;
    if (!found.timed) return;
    const chain = { name: "critical path", short: "critical", parts: found.path };
    const lanes = found.lanes.map((one) => ({
      name: one.node, text: seconds(one.busy), href: one.kind === "client" ? link(runLink(run, "clients", one.node), { round: found.round }) : null,
      parts: one.parts.map((part) => ({ ...part, detail: [part.detail, one.waits_for && part.name === "wait" ? `for ${one.waits_for}` : ""].filter(Boolean).join("; ") })),
    }));
    fall.update({
      seconds: found.seconds,
      lanes: [chain, ...lanes],
      note: [
        "outlined: on the critical path; at the right: seconds busy",
        found.folded ? "parts of one client are sums, laid out one after the other" : "",
        found.lanes.length < found.total ? `${number(found.lanes.length)} of ${number(found.total)} nodes` : "",
      ].filter(Boolean).join("; "),
    });
  }

  function drawWaits(found) {
    const words = (one) => [
      h("strong", { text: number(one.count) }), one.count === 1 ? " node (" : " nodes (", one.nodes.join(", "), one.count > one.nodes.length && ", …",
      ") waited ", seconds(one.seconds), one.count > 1 && " in all", " for ",
      one.whom === "server" ? "the server" : h("a", { href: runLink(run, "clients", one.whom), text: one.whom }), ".",
    ];
    fill(waited, found.waited.length
      ? found.waited.map((one) => h("li", {}, words(one)))
      : h("li", { class: "muted", text: found.in_turns ? "Clients took turns in one process: each waited for all the others." : "Nobody waited, as far as was recorded." }));
    fill(slowest, found.slowest.map((one) => h("a", { class: "chip", href: to(one.round), "aria-current": one.round === found.round ? "true" : null, text: `${one.round}: ${seconds(one.seconds)}` })),
      !found.slowest.length && h("span", { class: "muted", text: "No round was timed as a whole." }));
  }

  function drawTable(found) {
    const columns = [
      { name: "node", text: "node", class: "name", sort: "name", cell: (row) => (row.whole ? h("span", { class: "muted", text: "the whole run" }) : row.client ? h("a", { href: link(runLink(run, "clients", row.node), { round: here }), text: row.node }) : row.node) },
      ...found.columns.map((one, i) => ({
        name: one.name, text: one.title, num: true, sort: one.name, title: `${one.name}: ${one.meaning}`,
        cell: (row) => (row.odd?.includes(i)
          ? h("span", { class: "sev-critical", text: "NaN", title: "NaN or infinite" })
          : h("span", { title: exactly(row.values[i], one.unit), text: underTitle(row.values[i], one) })),
      })),
    ];
    const whole = found.whole.some((one) => one !== null) ? [{ node: "\u0000whole", whole: true, values: found.whole }] : [];
    table.show([...whole, ...found.rows], { columns, sort: found.sort, onSort: (sort) => params.set({ sort: sort === "-name" ? "name" : sort, page: null }), nothing: "No metric of a node in this round." });
    const page = params.number("page", 0);
    const step = (to_, text) => h("button", { class: "link-button", type: "button", text, on: { click: () => params.set({ page: to_ || null }) } });
    fill(more, found.total > ROWS && [
      h("span", { class: "muted", text: `nodes ${number(page * ROWS + 1)} to ${number(Math.min(found.total, (page + 1) * ROWS))} of ${number(found.total)}` }),
      page > 0 && step(page - 1, "previous"), (page + 1) * ROWS < found.total && step(page + 1, "next"),
    ]);
    fill(raw, h("span", { class: "muted", text: "records as stored:" }),
      ["metric", "span", "transfer", "event", "finding"].map((kind) => h("a", { href: link(of(run, "records"), { kind, round: here }), target: "_blank", rel: "noopener", text: `${kind}s` })));
  }

  return {
    async load(signal) {
      const page = Math.max(0, params.number("page", 0));
      const [found, metrics] = await Promise.all([
        ctx.api.get(of(run, "rounds", here), { clock: params.get("clock"), sort: params.get("order"), limit: LANES }, signal),
        ctx.api.get(of(run, "rounds", here, "metrics"), { sort: params.get("sort"), limit: ROWS, offset: page * ROWS }, signal),
      ]);
      return { found, metrics };
    },

    show({ found, metrics }) {
      drawHead(found);
      drawFall(found);
      drawWaits(found);
      drawTable(metrics);
    },

    destroy: () => fall.destroy(),

    keys: {
      "[": Object.assign(() => neighbours.previous !== null && neighbours.previous !== undefined && go(to(neighbours.previous)), { label: "the round before" }),
      "]": Object.assign(() => neighbours.next !== null && neighbours.next !== undefined && go(to(neighbours.next)), { label: "the next round" }),
    },
  };
}
