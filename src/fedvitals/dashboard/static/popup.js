// SPDX-License-Identifier: Apache-2.0
// A menu below a button: it exists only while it is open, and closes by Escape, Tab, a choice, or a click elsewhere.

import { h } from "./dom.js";

/** `entries()`: [text, work, tooltip] of each line when it is opened, inside `host`. Returns what closes it. */
export function popup(button, host, { label, entries, signal }) {
  let menu = null;
  const outside = (event) => {
    if (!menu.contains(event.target) && !button.contains(event.target)) close(false);
  };
  function close(back = true) {
    if (!menu) return;
    document.removeEventListener("pointerdown", outside, true);
    menu.remove();
    menu = null;
    button.setAttribute("aria-expanded", "false");
    if (back) button.focus();
  }
  function open() {
    const items = entries().map(([text, work, title]) =>
      h("button", { type: "button", role: "menuitem", tabindex: -1, text, title, on: { click: () => { close(); work(); } } }));
    menu = h("div", { class: "chart-menu", role: "menu", "aria-label": label }, items);
    menu.addEventListener("keydown", (event) => walk(event, items, close));
    host.append(menu);
    button.setAttribute("aria-expanded", "true");
    document.addEventListener("pointerdown", outside, true);
    items[0]?.focus();
  }
  button.setAttribute("aria-haspopup", "menu");
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => (menu ? close() : open()), { signal });
  return close;
}

function walk(event, items, close) {
  const at = items.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (to !== undefined) items[(to + items.length) % items.length].focus();
  else if (event.key === "Escape" || event.key === "Tab") close(event.key === "Escape");
  else return;
  if (event.key !== "Tab") event.preventDefault();
  event.stopPropagation();
}
