// SPDX-License-Identifier: Apache-2.0
// The composition of a whole as one bar: parts in their own colours, in order, with their labels below.

import { onTheme, partColour } from "../colour.js";
import { fill, h } from "../dom.js";
import { exact, percent } from "../format.js";

const LEAST = 0.005; // of the whole: smaller parts are in the bar, but not labelled

/** `show(title, total, [{name, seconds, share}])`. */
export function shareBar() {
  const head = h("div", { class: "share-head" });
  const bar = h("div", { class: "share-bar", role: "img" });
  const words = h("ul", { class: "share-words" });
  let parts = [];
  const paint = () => {
    fill(bar, parts.filter((one) => one.share > 0).map((one) =>
      h("span", { style: { width: `${100 * one.share}%`, background: partColour(one.name) }, title: `${one.name}: ${percent(one.share)}, ${exact(one.seconds)} s` })));
    fill(words, [...parts].sort((a, b) => b.share - a.share).filter((one) => one.share >= LEAST).map((one) =>
      h("li", {}, h("i", { class: "swatch", style: { background: partColour(one.name) } }), `${one.name} ${percent(one.share)}`)));
    bar.setAttribute("aria-label", parts.map((one) => `${one.name} ${percent(one.share)}`).join(", "));
  };
  const stop = onTheme(paint);
  return {
    node: h("div", { class: "share" }, head, bar, words),
    show(title, total, now) {
      parts = now;
      fill(head, h("span", { text: title }), h("span", { class: "muted", text: total }));
      paint();
    },
    destroy: stop,
  };
}
