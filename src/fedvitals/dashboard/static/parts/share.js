// SPDX-License-Identifier: Apache-2.0
// «Share», on every page: its address, a picture of it, and the report on its run.

import { api } from "../api.js";
import { fileName, save } from "../charts/download.js";
import { announce, h } from "../dom.js";
import { pagePicture } from "../page_picture.js";
import { place } from "../place.js";
import { popup } from "../popup.js";
import { addressOf } from "../root.js";

const SHOWN_MS = 6000;

/** `runs()`: the ids that the page is about; if none, there is no report. */
export function shareButton(runs) {
  const button = h("button", { type: "button", class: "share-button", text: "share", title: "Report, link or picture of this page" });
  const said = h("span", { class: "share-said muted", role: "status" });
  const node = h("div", { class: "sharing" }, said, button);
  let gone = null;

  function say(text, stays = false) {
    clearTimeout(gone);
    said.textContent = text;
    said.title = text;
    if (!stays) gone = setTimeout(() => { said.textContent = ""; }, SHOWN_MS);
  }

  /** Does the work, and shows the outcome. */
  async function attempt(before, work, after) {
    say(before, true);
    try {
      await work();
      say(after);
    } catch (error) {
      say(error.message);
      announce(error.message);
    }
  }

  const named = (ending) => fileName([place.run, place.page].filter(Boolean).join(" "), ending);
  const report = (kind) => attempt(`writing the report (${kind.toUpperCase()}) …`, async () => {
    const ids = runs();
    const blob = await api.file(addressOf("/api/report"), [...ids.map((run) => ["runs", run]), ["format", kind]]);
    save(blob, fileName([place.run || "runs", ids.length > 1 ? "comparison" : "report"].join(" "), kind));
  }, "report saved");

  popup(button, node, {
    label: "Share",
    entries: () => [
      ...(runs().length ? [
        ["Report (HTML)", () => report("html"), "One file without scripts: what happened, evidence, what to do, and an appendix"],
        ["Report (PDF)", () => report("pdf"), "Printed by a Chromium on the machine of the dashboard"],
      ] : []),
      ["Copy link", () => attempt("", () => copy(location.href), "link copied"), "Opens this view, for everybody who can reach this dashboard"],
      ["Picture (PNG)", () => attempt("drawing …", async () => save(await pagePicture(), named("png")), "picture saved"), "This page as it is seen"],
    ],
  });
  return node;
}

/**
 * On an address without encryption browsers have no clipboard: then the link is shown, selected, to be copied by hand.
 */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = h("input", { class: "field", value: text, readonly: true, "aria-label": "Link to this view" });
  const dialog = h("dialog", { "aria-label": "Link to this view" }, field, h("form", { method: "dialog" }, h("button", { class: "button", text: "Close" })));
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
  field.select();
  return undefined;
}
