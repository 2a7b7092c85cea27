// SPDX-License-Identifier: Apache-2.0
// Keys: «g» and a letter goes to a page, «?» lists them all, «t» changes the theme; a page may have its own.

import { h } from "./dom.js";
import { runLink } from "./params.js";
import { compareLink } from "./parts/chosen.js";
import { addressOf } from "./root.js";
import { changeTheme } from "./theme.js";

const PAGES = { o: "overview", c: "clients", m: "map", l: "layers", a: "adapters", r: "rounds", t: "topology", f: "findings", p: "replay" };

function typing(target) {
  return target instanceof Element && target.closest("input, textarea, select, [contenteditable], dialog") !== null;
}

function help(own) {
  const rows = [
    ["g h", "all runs"],
    ["g x", "compare this run with others"],
    ...Object.entries(PAGES).map(([key, page]) => [`g ${key}`, page]),
    ["t", "light or dark"],
    ["Tab, ← →", "into a plot, and along it"],
    ["+ −, [ ]", "in a plot: closer or wider, and sideways"],
    ["0, double click", "in a plot: all rounds again"],
    ...Object.entries(own ?? {}).map(([key, act]) => [key, act.label ?? "on this page"]),
  ];
  const dialog = h("dialog", { class: "help", "aria-label": "Keys" },
    h("h2", { text: "Keys" }),
    h("dl", {}, rows.map(([key, what]) => [h("dt", {}, h("kbd", { text: key })), h("dd", { text: what })])),
    h("form", { method: "dialog" }, h("button", { class: "button", text: "Close" })));
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}

export function keyboard(page, go) {
  let before = "";
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
    const now = page();
    const own = now?.view?.keys ?? {};
    const key = event.key;
    if (before === "g" && key === "x") go(now?.run ? compareLink([now.run]) : addressOf("/compare"));
    else if (before === "g" && (key === "h" || (PAGES[key] && now?.run))) {
      go(key === "h" ? addressOf("/") : key === "o" ? runLink(now.run) : runLink(now.run, PAGES[key]));
    } else if (own[key]) own[key](event);
    else if (key === "?") help(own);
    else if (key === "t" && before !== "g") changeTheme();
    else {
      before = key;
      return;
    }
    before = "";
    event.preventDefault();
  });
}
