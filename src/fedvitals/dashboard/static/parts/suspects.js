// SPDX-License-Identifier: Apache-2.0
// The suspects, and how strongly. A click draws a suspect's own lines over the cohort; its name leads to its page.

import { fill, h, keyed } from "../dom.js";
import { runLink } from "../params.js";
import { labelOf, nameOf } from "./who.js";

const SHOWN = 10;

/** choose(node|null): the user wants to see this client in all charts. */
export function suspectList(choose) {
  const list = h("ul", { class: "suspect-list" });
  const rest = h("p", { class: "small muted" });
  const node = h("section", { class: "panel", "aria-label": "Suspects" }, h("h2", { text: "suspects" }), list, rest);

  return {
    node,
    show(run, suspects, clients, chosen) {
      keyed(list, suspects.slice(0, SHOWN), (one) => one.node, () => h("li", {}), (item, one) => line(item, run, one, chosen, choose));
      const others = clients - suspects.length;
      const more = suspects.length - SHOWN;
      fill(rest,
        more > 0 && [h("a", { href: runLink(run, "clients"), text: `${more} more` }), " · "],
        suspects.length ? others > 0 && `the other ${others} are not suspected` : "Nobody is suspected.");
    },
  };
}

function line(item, run, one, chosen, choose) {
  const now = JSON.stringify([one, chosen === one.node]);
  if (item.dataset.now === now) return;
  item.dataset.now = now;
  const score = Math.max(0, Math.min(1, one.score ?? 0));
  const bar = h("span", { class: `fill-${one.severity}` });
  bar.style.width = `${100 * score}%`;
  fill(item,
    h("span", {}, h("a", { class: "name", href: runLink(run, "clients", one.node) }, nameOf(one.node)), labelOf(one.label)),
    h("span", { class: "num", text: one.sure }),
    h("button", {
      class: "link-button small", "aria-pressed": String(chosen === one.node), "aria-label": `Show ${one.label || one.node} in all pictures`,
      text: chosen === one.node ? "shown" : "show", on: { click: () => choose(chosen === one.node ? null : one.node) },
    }),
    h("span", { class: "bar", "aria-hidden": "true" }, bar),
    h("span", { class: "small muted reason", text: one.reason }));
}
