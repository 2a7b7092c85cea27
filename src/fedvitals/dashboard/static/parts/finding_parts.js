// SPDX-License-Identifier: Apache-2.0
// The parts of a finding's page besides its charts: numbers, certainty, suspects, actions, the error.

import { h } from "../dom.js";
import { exactly, number, sure, when, withUnit } from "../format.js";
import { runLink } from "../params.js";
import { labelOf, nameOf } from "./who.js";

export function numbersTable(rows) {
  const cell = (value, unit) => h("td", { class: "num", title: value === null ? null : exactly(value, unit), text: value === null ? "" : withUnit(value, unit) });
  return h("table", { class: "data" },
    h("thead", {}, h("tr", {}, ["what", "value", "usual", "of", "σ"].map((text, i) => h("th", { scope: "col", class: i && i !== 3 ? "num" : "", text })))),
    h("tbody", {}, rows.map((row) => h("tr", {},
      h("th", { scope: "row", title: [row.name, row.meaning].filter(Boolean).join(": ") }, row.title,
        row.compared_as && h("span", { class: "muted small", text: `, compared as ${row.compared_as}: ${number(row.value)}${row.usual === null ? "" : ` against ${number(row.usual)}`}` })),
      cell(row.raw_value, row.unit), cell(row.raw_usual, row.unit), h("td", { class: "muted", text: row.usual === null ? "" : row.of }), cell(row.score)))));
}

/** «something is wrong 95 %», the family, the exact cause: each with its own probability; nothing without causes. */
export function causeLevels(levels) {
  return levels.length > 0 && h("dl", { class: "cause-levels small", "aria-label": "How sure of what" }, levels.map((one) => h("div", {},
    h("dt", { class: "muted", text: one.words }), h("dd", { class: "num", text: sure(one.probability) }))));
}

export function trustBox(one, found) {
  const { trust } = found;
  return [
    h("p", { class: "finding-sure" }, h("span", { class: "big", text: one.sure }), h("span", { class: "muted", text: found.exact ? " sure, an exact test" : " sure" })),
    causeLevels(one.levels),
    h("p", { class: "small", text: trust.words }),
    trust.false_alarms !== null && h("p", { class: "small muted", text: `Measured in the fault bank: ${number(trust.false_alarms)} false alarms of this kind per 100 healthy rounds (${number(trust.healthy_rounds)} rounds without any fault).` }),
    trust.false_alarms === null && h("p", { class: "small muted", text: "How often it is a false alarm was not measured." }),
    found.reference && h("p", { class: "small muted", text: `Reference: ${found.reference}` }),
  ];
}

/** One bar for each suspect; the length is how strongly it is suspected. */
export function suspectBars(run, suspects, severity) {
  return h("ul", { class: "suspect-list" }, suspects.slice(0, 20).map((one) => {
    const share = Math.max(0, Math.min(1, one.score ?? 0));
    const bar = h("span", { class: `fill-${severity}` });
    bar.style.width = `${100 * share}%`;
    return h("li", {},
      h("span", {}, h("a", { class: "name", href: runLink(run, "clients", one.node) }, nameOf(one.node)), labelOf(one.label)),
      h("span", { class: "num", text: one.sure }), h("span", {}),
      h("span", { class: "bar", "aria-hidden": "true" }, bar), h("span", { class: "small muted reason", text: one.reason }));
  }));
}

export function actionList(actions) {
  if (!actions.length) return h("p", { class: "muted", text: "Nothing was proposed or done about it." });
  return h("ul", { class: "plain-list" }, actions.map((one) => h("li", {},
    h("span", { class: "tag", text: one.status }), ` ${one.kind.replaceAll("_", " ")}`, one.target !== null && [" ", h("b", { text: one.target })],
    h("span", { class: "muted small", text: [one.round === null ? "" : ` round ${one.round}`, when(one.at)].filter(Boolean).join(", ") }),
    one.arguments && h("div", { class: "small", text: one.arguments }),
    one.why && h("div", { class: "small muted", text: one.why }))));
}

/** The error's own message, and the traceback as far as privacy let it leave. */
export function errorBox(error) {
  return [
    h("p", {}, h("span", { class: "muted", text: `${error.event}${error.round === null ? "" : `, round ${error.round}`}: ` }), h("span", { class: "finding-message", text: error.message })),
    error.traceback.length
      ? h("pre", { class: "code", tabindex: "0", "aria-label": "Traceback" }, h("code", { text: error.traceback.join("\n") }))
      : h("p", { class: "small muted", text: "No traceback was kept: that needs Monitor(tracebacks=True) and privacy level 3." }),
  ];
}
