// SPDX-License-Identifier: Apache-2.0
// Placeholders: for data to come, for missing data, and for errors.

import { h, words } from "../dom.js";
import { addressOf } from "../root.js";

const LINES = `import fedvitals as fv

with fv.Monitor("runs.db", run="mine") as monitor:
    for r in range(rounds):
        with monitor.round(r, global_model):
            ...  # with monitor.client(name, local_model): train it, as you do`;

export function skeleton() {
  return h("div", { class: "skeleton", "aria-busy": "true", "aria-label": "Loading" },
    h("div", { class: "skeleton-line wide" }), h("div", { class: "skeleton-line" }),
    h("div", { class: "skeleton-block" }), h("div", { class: "skeleton-block" }), h("div", { class: "skeleton-block" }));
}

/** Nothing is here: what it is, why, and where to go. */
export function nothing(title, why, onward, code) {
  return h("section", { class: "state" }, h("h1", { text: title }), why && h("p", {}, words(why)),
    code && h("pre", { class: "code", tabindex: "0", "aria-label": "Code" }, h("code", { text: code })),
    onward && h("p", {}, h("a", { class: "button", href: onward.href, text: onward.text })));
}

/** No run yet: the commands that would create one. */
nothing.runs = (store) =>
  nothing("No run yet.", `The store ${store} waits for its first run. These lines around your training fill it; ` +
    "this page notices by itself. Or see a ready federation with a faulty client: `fedvitals demo`.", null, LINES);

nothing.store = (error, retry) =>
  h("section", { class: "state" }, h("h1", { text: "No store to read yet." }), h("p", {}, words(error.message)),
    h("pre", { class: "code", tabindex: "0", "aria-label": "Code" }, h("code", { text: LINES })),
    h("p", {}, h("button", { class: "button", text: "Look again", on: { click: retry } })));

/** An error: what, since when, what still works, and a retry. */
export function broken(error, retry) {
  const here = error.status === undefined;
  return h("section", { class: "state", role: "alert" },
    h("h1", { text: error.status === 404 ? "Not here." : "This page could not be drawn." }),
    h("p", {}, words(here ? `The page itself failed: ${error.message}` : error.message)),
    error.hint && h("p", { class: "muted" }, words(error.hint)),
    h("p", { class: "muted", text: `At ${new Date().toLocaleTimeString()}. Training is never touched by this page; the command line reads the same store.` }),
    h("p", {}, h("button", { class: "button", text: "Try again", on: { click: retry } }), " ", h("a", { class: "link-button", href: addressOf("/"), text: "All runs" })));
}

/** A small note inside a panel that has nothing to show. */
export function empty(text, hint) {
  return h("p", { class: "empty" }, text, hint && h("span", { class: "muted" }, " ", words(hint)));
}
