// SPDX-License-Identifier: Apache-2.0
// The state at a round: the model before and after, measurements, layer by layer; and how to run it again.

import { announce, fill, h } from "../dom.js";
import { exact, exactly, number, percent, seconds, withUnit } from "../format.js";
import { runLink } from "../params.js";
import { rowTable } from "./rows.js";

const FEW = 12; // layers shown unless the user asks for all
const UNBROKEN = 32; // letters of a command's word that stay on one line
const SHORT = 12; // digits of a digest that identify it

/** Which bits, abbreviated; all of them in the tooltip and in a copy. */
export function digest(text, whole = null) {
  if (text === null) return h("span", { class: "muted", text: "–" });
  return h("code", { class: "digest", title: `${text}${whole === null ? "" : whole ? ": on the tape, whole" : ": its digest only"}`, text: text.slice(0, SHORT) });
}

const change = (before, after) => (before > 0 && after !== null && before !== null ? (after - before) / before : null);
const signed = (share) => (share === null ? "–" : `${share > 0 ? "+" : ""}${percent(share)}`);

export function modelPanel() {
  const [facts, moved, note, more] = [h("dl", { class: "facts-list" }), h("div", {}), h("p", { class: "small muted" }), h("p", {})];
  const measured = rowTable([
    { name: "name", text: "metric", class: "name", cell: (row) => h("span", { title: row.name, text: row.title }) },
    { name: "before", text: "before", num: true, cell: (row) => h("span", { title: exactly(row.before, row.unit), text: withUnit(row.before, row.unit) }) },
    { name: "after", text: "after", num: true, cell: (row) => h("span", { title: exactly(row.after, row.unit), text: row.after === null ? "NaN" : withUnit(row.after, row.unit) }) },
    { name: "change", text: "change", num: true, cell: (row) => difference(row) },
  ], { key: (row) => row.name, caption: "What was measured before and after the round" });
  const layers = rowTable([], { key: (row) => row.name, caption: "Norm of each layer before and after the round" });
  moved.append(layers.node);
  let [all, shown] = [false, null];

  function drawLayers(found) {
    const columns = [
      { name: "name", text: "layer", class: "name", cell: (row) => row.name },
      { name: "before", text: "norm before", num: true, cell: (row) => norm(row.before) },
      { name: "after", text: "after", num: true, cell: (row) => norm(row.after) },
      { name: "change", text: "change", num: true, cell: (row) => (row.same ? h("span", { class: "muted", text: "unchanged" }) : signed(change(row.before, row.after))) },
      found.stepped && { name: "step", text: "step", num: true, title: "Norm of what changed: of the model after minus the model before.", cell: (row) => norm(row.step) },
    ].filter(Boolean);
    layers.show(all ? found.layers : found.layers.slice(0, FEW), { columns, nothing: "The tape names no layers." });
    fill(more, found.layers.length > FEW && h("button", { class: "link-button", type: "button", text: all ? `the first ${FEW} layers` : `all ${number(found.layers.length)} layers`, on: { click: toggle } }));
  }
  function toggle() {
    all = !all;
    drawLayers(shown);
  }

  return {
    node: h("section", { class: "panel" }, h("h2", { text: "the model" }), facts, measured.node, moved, more, note),
    show(found) {
      shown = found;
      fill(facts,
        h("dt", { text: "before" }), h("dd", {}, digest(found.digest), " ", h("span", { class: "muted small", text: found.kind === "whole" ? "whole on the tape" : "its digest" })),
        h("dt", { text: "after" }), h("dd", {}, digest(found.digest_after), found.digest !== null && found.digest === found.digest_after && h("span", { class: "muted", text: " the same: nothing changed" })),
        found.clock_after !== null && [h("dt", { text: "virtual clock" }), h("dd", { text: `${seconds(found.clock ?? 0)} to ${seconds(found.clock_after)}` })],
        found.states.length > 0 && [h("dt", { text: "also remembered" }), h("dd", {}, found.states.slice(0, 6).map((one, i) => [i > 0 && ", ", one.name, " ", digest(one.digest, one.whole)]), found.states.length > 6 && ` and ${found.states.length - 6} more`)]);
      measured.show(found.metrics, { nothing: "Nothing was measured at the end of this round." });
      drawLayers(found);
      note.textContent = found.stepped ? "" : "How far each layer went is known where the models before and after are both stored; their norms always are.";
    },
  };
}

const norm = (value) => h("span", { title: exact(value), class: value === null ? "sev-critical" : null, text: value === null ? "NaN" : number(value) });

function difference(row) {
  if (row.before === null || row.after === null) return "–";
  const by = row.after - row.before;
  return row.unit === "share" ? `${by > 0 ? "+" : ""}${number(100 * by)} points` : `${by > 0 ? "+" : ""}${withUnit(by, row.unit)}`;
}

/** What can be done with the round outside this page; and what was in force in it. */
export function waysPanel(run) {
  const [list, forced, findings] = [h("ul", { class: "plain-list commands" }), h("div", {}), h("ul", { class: "plain-list" })];
  return {
    node: h("div", {},
      h("section", { class: "panel" }, h("h2", { text: "found in this round" }), findings),
      h("section", { class: "panel" }, h("h2", { text: "run it again" }), list),
      h("section", { class: "panel" }, h("h2", { text: "corrections in force" }), forced)),
    show(found, choose) {
      fill(findings, found.findings.length
        ? found.findings.map((one) => h("li", {}, h("a", { href: runLink(run, "findings", one.key), class: `sev-${one.severity}`, text: `${{ critical: "■", warning: "▲" }[one.severity] ?? "·"} ${one.words}` }),
          suspectsOf(one).map((node) => [" ", h("button", { class: "link-button small", type: "button", text: `look at ${node}`, on: { click: () => choose(node) } })])))
        : h("li", { class: "muted", text: "Nothing." }));
      fill(list, found.commands.length
        ? found.commands.map((one) => h("li", {}, h("div", { class: "small muted", text: one.what }), command(one.text)))
        : h("li", { class: "muted", text: found.trouble === null ? "No whole state is left from which this round could be run again. A larger budget keeps more: fv.Tape(budget=\"4 GB\")." : "What cannot be read cannot be run again." }));
      fill(forced, found.actions.length
        ? h("ul", { class: "plain-list" }, found.actions.map((one) => h("li", {}, h("b", { text: one.kind.replaceAll("_", " ") }), one.target !== null && ` ${one.target}`, h("span", { class: "muted small", text: [one.arguments, one.why].filter(Boolean).map((text) => `, ${text}`).join("") }))))
        : h("p", { class: "muted", text: "None." }));
    },
  };
}

const suspectsOf = (one) => [...new Set([one.node, ...one.suspects].filter((node) => node !== null))].slice(0, 3);

/** A line for the terminal, with a button that copies it. */
export function command(text) {
  const parts = text.split(" "); // lines break between words only, not at the dashes of an option
  const code = h("code", {}, parts.map((part, i) => [i > 0 && " ", part.length < UNBROKEN ? h("span", { class: "nowrap", text: part }) : part]));
  const button = h("button", { class: "link-button small", type: "button", text: "copy", "aria-label": `Copy: ${text}`, on: { click: copy } });
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      announce("Copied.");
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code); // a page from another machine may not write there
      button.textContent = "selected";
    }
    setTimeout(() => (button.textContent = "copy"), 2000);
  }
  return h("div", { class: "command" }, h("pre", { class: "code", tabindex: 0, "aria-label": "Command" }, code), button);
}
