// SPDX-License-Identifier: Apache-2.0
// What is known of one client besides its signs: findings, what it reported of its data, events.

import { SHAPES } from "../colour.js";
import { fill, h, keyed } from "../dom.js";
import { exactly, number, percent, underTitle, when, withUnit } from "../format.js";
import { runLink } from "../params.js";
import { causeLevels } from "./finding_parts.js";

export function panel(name, ...children) {
  return h("section", { class: "panel", "aria-label": name }, h("h2", { text: name }), children);
}

/** Its findings, worst first, each with a link to its evidence. */
export function caseList(run) {
  const list = h("ul", { class: "client-cases" });
  return {
    node: list,
    show(cases) {
      keyed(list, cases, (one) => one.key, () => h("li", {}), (item, one) => {
        const now = JSON.stringify(one);
        if (item.dataset.now === now) return;
        item.dataset.now = now;
        const href = runLink(run, "findings", one.key);
        item.className = one.still_there && !one.muted ? "" : "over";
        fill(item,
          h("p", {}, h("span", { class: `sev-${one.severity}` }, h("span", { "aria-hidden": "true", text: `${SHAPES[one.severity] ?? "·"} ` }), one.severity),
            " ", h("a", { href, text: one.looks || one.title }), one.layer && ` in ${one.layer}`,
            h("span", { class: "muted", text: ` ${one.sure}, ${one.timeline}` }),
            one.muted && h("span", { class: "muted", text: ", muted" }), one.acknowledged && h("span", { class: "muted", text: ", acknowledged" })),
          h("p", { class: "muted small", text: one.message }),
          causeLevels(one.levels),
          h("p", { class: "small" }, h("a", { href, text: "evidence" }), " ", h("a", { href: `${href}#remedies`, text: "what to do" })));
      });
    },
  };
}

/** The numbers behind a finding, with the usual ones. */
export function numbersTable(numbers) {
  if (!numbers.length) return null;
  return h("table", { class: "data small" }, h("caption", { class: "unseen", text: "Evidence of the finding" }),
    h("thead", {}, h("tr", {}, ["sign", "value", "usual", "σ"].map((text, i) => h("th", { scope: "col", class: i ? "num" : null, text })))),
    h("tbody", {}, numbers.slice(0, 6).map((one) => h("tr", {},
      h("td", { title: [one.name, one.meaning].filter(Boolean).join(": ") }, one.title, one.compared_as && h("span", { class: "muted", text: ` (compared as ${one.compared_as})` })), h("td", { class: "num", text: withUnit(one.raw_value, one.unit) }), h("td", { class: "num", text: withUnit(one.raw_usual, one.unit) }), h("td", { class: "num", text: number(one.score ?? null) })))));
}

export function factList(facts) {
  return h("dl", { class: "facts-list" }, facts.map((one) => [
    h("dt", { text: one.title, title: `${one.name}: ${one.meaning}` }),
    h("dd", { title: one.value === null ? null : exactly(one.value, one.unit) },
      one.value === null ? h("span", { class: "sev-critical", text: "NaN" }) : underTitle(one.value, one),
      h("span", { class: "muted small", text: ` r${one.round}${one.median === null ? "" : `; median ${underTitle(one.median, one)}`}`, title: one.median === null ? null : `median of ${number(one.clients)} clients` })),
  ]));
}

/** Its labels as bars, and the mean of the others as a tick on each. */
export function labelBars(labels) {
  const most = Math.max(...labels.map((one) => Math.max(one.share, one.others ?? 0)), 1e-9);
  return h("table", { class: "label-bars" }, h("caption", { class: "small muted", text: "its samples by label; the tick is the mean share of the other clients" }),
    h("tbody", {}, labels.map((one) => {
      const bar = h("span", { class: "label-bar" }, h("span", { class: "label-fill", style: { width: `${(100 * one.share) / most}%` } }),
        one.others !== null && h("span", { class: "label-tick", style: { left: `${(100 * one.others) / most}%` } }));
      return h("tr", { title: `${number(one.count)} samples, ${percent(one.share)}${one.others === null ? "" : `; others ${percent(one.others)}`}` },
        h("th", { scope: "row", text: one.label }), h("td", { class: "label-cell" }, bar), h("td", { class: "num small", text: number(one.count) }));
    })));
}

/** Training losses by class; of a language model by bands of tokens, and of lengths of texts. */
export function lossBands(parts) {
  return parts.map((part) => h("table", { class: "data small" },
    h("caption", { class: "small muted", text: `by ${part.title}, r${part.round}${part.total > part.bands.length ? `, highest ${part.bands.length} of ${part.total}` : ""}` }),
    h("thead", {}, h("tr", {}, [part.title === "class" ? "class" : "band", part.counted === "texts" ? "texts" : part.title === "class" ? "samples" : "targets", "loss", "others", "right"].map((text, i) => h("th", {
      scope: "col", class: i ? "num" : null, title: { loss: "mean, in nats", others: "median of the other clients' mean losses", right: "share of targets predicted right" }[text] ?? null, text,
    })))),
    h("tbody", {}, part.bands.map((one) => h("tr", {},
      h("th", { scope: "row", text: one.name }), h("td", { class: "num", text: number(one.count) }), h("td", { class: "num", text: number(one.loss) }),
      h("td", { class: "num", text: number(one.median) }), h("td", { class: "num", text: one.right === null ? "" : percent(one.right) }))))));
}

const LEVELS = { error: "sev-critical", critical: "sev-critical", warning: "sev-warning" };

/** Its events; a traceback is text, and opens on demand. */
export function eventList(run, events) {
  return h("ul", { class: "event-list" }, events.map((one) => h("li", {},
    h("span", { class: "muted small nowrap", text: one.at === null ? "" : when(one.at) }), " ",
    one.round !== null && [h("a", { class: "small", href: runLink(run, "rounds", String(one.round)), text: `r${one.round}` }), " "],
    h("span", { class: LEVELS[one.level] ?? "muted", text: one.level }), " ", h("span", { text: one.name }),
    h("p", { class: "small event-words", text: one.message }),
    one.traceback && h("details", { class: "small" }, h("summary", { text: `traceback${one.exception ? ` of ${one.exception}` : ""}` }),
      h("pre", { class: "code", tabindex: "0", "aria-label": "Traceback", text: one.traceback })))));
}
