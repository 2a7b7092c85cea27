// SPDX-License-Identifier: Apache-2.0
// Finds a run to add, among any number of runs.

import { fill, h } from "../dom.js";
import { ago, number } from "../format.js";
import { addressOf } from "../root.js";
import { healthMark } from "./health.js";

const SHOWN = 8;
const WAIT = 150; // ms after the last keystroke

export function runPicker(ctx, add) {
  let typed = null;
  let asked = 0;
  let without = [];
  const search = h("input", { class: "field search", type: "search", "aria-label": "Search a run to add", placeholder: "name, id, tag or host", maxlength: 200, on: { input: () => { clearTimeout(typed); typed = setTimeout(look, WAIT); } } });
  const found = h("ul", { class: "picker-list" });
  const said = h("p", { class: "muted small", role: "status" });
  const node = h("details", { class: "picker", on: { toggle: () => node.open && look().then(() => search.focus({ preventScroll: true })) } },
    h("summary", { class: "link-button", text: "Add a run" }), search, found, said);

  async function look() {
    const mine = (asked += 1);
    try {
      const page = await ctx.api.get(addressOf("/api/runs"), { search: search.value.trim(), limit: SHOWN + without.length }, ctx.signal);
      if (mine !== asked) return;
      const others = page.runs.filter((run) => !without.includes(run.id)).slice(0, SHOWN);
      fill(found, others.map(entry));
      const left = page.total - page.runs.filter((run) => without.includes(run.id)).length - others.length;
      said.textContent = others.length ? (left > 0 ? `${number(left)} more: search for them` : "") : "No other run is like that.";
    } catch (error) {
      if (error.name !== "AbortError") said.textContent = error.message;
    }
  }

  function entry(run) {
    return h("li", {}, h("button", { class: "picker-run", type: "button", on: { click: () => add(run.id) } },
      healthMark(run.health, run.findings), h("span", { class: "name", text: run.name }),
      h("span", { class: "muted small", text: `${run.id} · ${number(run.rounds)} rounds · ${ago(run.started)}` })));
  }

  return {
    node,
    show(chosen, full) {
      const changed = JSON.stringify(chosen) !== JSON.stringify(without);
      without = chosen;
      node.hidden = full;
      if (chosen.length < 2) node.open = true;
      else if (changed && node.open) look();
    },
    destroy: () => clearTimeout(typed),
  };
}
