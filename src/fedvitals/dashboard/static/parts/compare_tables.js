// SPDX-License-Identifier: Apache-2.0
// The tables of a comparison: figures with their differences, findings side by side, settings.

import { SHAPES } from "../colour.js";
import { fill, h } from "../dom.js";
import { NONE, exact, exactly, number, withUnit } from "../format.js";
import { runLink } from "../params.js";

const THIN = "\u202f";

const unbroken = (text) => text.replaceAll(" %", `${THIN}%`);

const signed = (value, unit) => `${value > 0 ? "+" : ""}${number(value)}${unit}`;

function shown(value, unit) {
  if (value === null && unit === "rounds") return "never";
  if (unit === "times" && value !== null) return `${number(value)}${THIN}×`;
  if (unit === "cases" || unit === "rounds") return number(value);
  return withUnit(value, unit);
}

/** By how much, in the usual unit: points of a share, rounds, else per cent. */
export function sizeOf(change, unit) {
  if (change.difference === 0) return "same";
  if (unit === "share") return signed(100 * change.difference, `${THIN}points`);
  if (unit === "rounds" || unit === "cases" || change.relative === null) return signed(change.difference, "");
  if (Math.abs(change.relative) > 9) return `× ${number(1 + change.relative)}`;
  return signed(100 * change.relative, `${THIN}%`);
}

function reachOf(change, unit) {
  if (change.low === null || change.low === change.high || change.difference === 0) return "";
  let reach = change.difference - change.low;
  if (unit === "share") reach *= 100;
  else if (unit !== "rounds" && unit !== "cases" && change.relative !== null) reach *= 100 * Math.abs(change.relative / change.difference);
  return ` ± ${number(reach)}`;
}

function changeCell(change, row) {
  if (change === null) return h("td", { class: "num muted", text: NONE });
  const good = row.better && change.difference !== 0 && change.beyond_chance !== false ? (change.difference > 0) === (row.better === "higher") : null;
  const word = good === null ? "" : good ? "better" : "worse";
  return h("td", { class: `num ${good === null ? "muted" : good ? "sev-ok" : "sev-critical"}`, title: `difference ${exact(change.difference)}${word && `, ${word}`}` },
    sizeOf(change, row.unit), h("span", { class: "muted", text: reachOf(change, row.unit) }),
    change.beyond_chance ? h("span", { title: "larger than chance explains", text: "*" }) : "",
    word && h("span", { class: "unseen", text: ` ${word}` }));
}

export function figureTable(data, marks) {
  const head = h("tr", {}, h("th", { scope: "col", text: "" }), h("th", { scope: "col", text: "figure" }), data.sides.map((side, i) => [
    h("th", { class: "num", scope: "col" }, marks[i]()), i ? h("th", { class: "num", scope: "col", text: `from ${data.sides[0].letter}` }) : null]));
  let topic = "";
  const rows = data.rows.map((row) => {
    const first = row.topic !== topic;
    topic = row.topic;
    return h("tr", {}, h("td", { class: "muted", text: first ? row.topic : "" }), h("th", { class: "figure", scope: "row", text: unbroken(row.name) }),
      row.values.map((value, i) => [h("td", { class: "num", title: value === null ? null : exactly(value, row.unit), text: row.odd.includes(i) ? "NaN" : shown(value, row.unit) }), i ? changeCell(row.changes[i - 1], row) : null]));
  });
  const banded = data.rows.some((row) => row.changes.some((change) => change !== null && change.low !== null));
  return [wide("Figures", h("table", { class: "data compared" }, h("thead", {}, head), h("tbody", {}, rows))),
    banded && h("p", { class: "small muted", text: "± 95 % interval; * larger than chance explains." })];
}

export function troubleTable(data, marks) {
  const unjudged = data.sides.filter((side) => !side.judged).map((side) => side.letter);
  const note = unjudged.length > 0 && h("p", { class: "small muted", text: `Not judged, or not in full: ${unjudged.join(", ")}. fedvitals findings RUN says why.` });
  if (!data.troubles.length) return [note, h("p", { class: "empty", text: unjudged.length === data.sides.length ? "None was judged in full." : "No finding in any of them." })];
  const head = h("tr", {}, h("th", { scope: "col", text: "" }), h("th", { scope: "col", text: "finding" }), h("th", { scope: "col", text: "where" }), marks.map((mark) => h("th", { class: "num", scope: "col" }, mark())));
  const rows = data.troubles.map((one) => h("tr", {}, h("td", { class: `sev-${one.severity} nowrap`, text: `${SHAPES[one.severity] ?? "·"} ${one.severity}` }),
    h("td", { text: one.title, title: one.issue }), h("td", { class: "name", text: one.place }),
    one.runs.map((count, i) => h("td", { class: "num" }, count ? link(data.sides[i], count) : h("span", { class: "muted", text: NONE })))));
  return [note, wide("Findings", h("table", { class: "data compared" }, h("thead", {}, head), h("tbody", {}, rows)))];
}

function link(side, count) {
  const of = side.runs.length;
  return h("a", { href: runLink(side.runs[0], "findings"), text: of > 1 ? `${count} of ${of}` : "yes" });
}

export function settingTable(data, marks) {
  const differing = data.settings.filter((one) => one.differs);
  const same = data.settings.filter((one) => !one.differs);
  const head = h("tr", {}, h("th", { scope: "col", text: "setting" }), marks.map((mark) => h("th", { scope: "col" }, mark())));
  const line = (one) => h("tr", {}, h("th", { class: "name figure", scope: "row", text: one.name }), one.values.map((value, i) =>
    h("td", { class: `setting ${one.differs && value !== one.values[0] ? "changed" : ""}`, title: value }, value ?? NONE,
      one.defaults[i] && h("span", { class: "muted", text: " (default)" }))));
  const table = (rows) => h("table", { class: "data compared" }, h("thead", {}, head.cloneNode(true)), h("tbody", {}, rows.map(line)));
  const all = h("div", {});
  return [
    differing.length ? wide("Settings that differ", table(differing)) : h("p", { class: "empty", text: "No setting, seed or version differs: what differs lies outside of them." }),
    same.length > 0 && h("details", { on: { toggle: (event) => event.target.open && fill(all, wide("Settings that are the same", table(same))) } },
      h("summary", { class: "muted", text: `${number(same.length)} settings are the same` }), all),
  ];
}

function wide(label, table) {
  return h("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": label }, table);
}
