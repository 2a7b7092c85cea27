// SPDX-License-Identifier: Apache-2.0
// Findings in brief, worst first: shape, what and where, since when, how sure. Muted ones are counted, not listed.

import { SHAPES } from "../colour.js";
import { fill, h, keyed } from "../dom.js";
import { runLink } from "../params.js";
import { labelOf, nameOf } from "./who.js";

const SHOWN = 12;

export function findingList() {
  const list = h("ul", { class: "finding-list" });
  const rest = h("p", { class: "small muted finding-rest" });
  const node = h("section", { class: "panel", "aria-label": "Findings" },
    h("h2", {}, "findings", h("span", { class: "sorted", text: "worst first" })), list, rest);

  return {
    node,
    show(run, cases, total, muted) {
      const open = cases.filter((one) => !one.muted);
      keyed(list, open.slice(0, SHOWN), (one) => one.key, () => h("li", {}), (item, one) => line(item, run, one));
      const more = total - muted - Math.min(open.length, SHOWN);
      const parts = [
        !open.length && "No finding.",
        more > 0 && h("a", { href: runLink(run, "findings"), text: `${more} more` }),
        muted > 0 && h("a", { href: runLink(run, "findings"), text: `muted ${muted}` }),
      ].filter(Boolean);
      fill(rest, parts.map((part, i) => [i ? " · " : "", part]));
      rest.hidden = !parts.length;
    },
  };
}

function line(item, run, one) {
  const now = JSON.stringify(one);
  if (item.dataset.now === now) return;
  item.dataset.now = now;
  const since = one.since === null ? "" : `r${one.since}–${one.still_there ? "" : one.last}`;
  item.className = one.still_there ? "" : "over";
  fill(item, h("a", { class: "finding-line", href: runLink(run, "findings", one.key), title: one.message },
    h("span", { class: `sev-${one.severity} shape`, "aria-label": one.severity, role: "img", text: SHAPES[one.severity] ?? "·" }),
    h("span", { class: "what" }, nameOf(one.node ?? one.layer ?? one.place), labelOf(one.label), " ", h("span", { class: "muted", text: one.looks || one.title })),
    h("span", { class: "num small", text: since }),
    h("span", { class: "num small", text: one.sure }),
    one.acknowledged && h("span", { class: "small muted seen", text: "✓ acknowledged" })));
}
