// SPDX-License-Identifier: Apache-2.0
// Confirms the deletion of a run, and edits its tags.

import { of } from "../api.js";
import { announce, fill, h } from "../dom.js";
import { bytes, number } from "../format.js";

const LONGEST = 40;

/** A dialog that leaves nothing behind; focus returns to where it was. */
function opened(label, ...children) {
  const before = document.activeElement;
  const dialog = h("dialog", { "aria-label": label }, children);
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (before instanceof HTMLElement && before.isConnected) before.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

function trouble(error) {
  return [h("span", { class: "sev-critical", text: error.message }), error.hint && h("span", { class: "muted", text: ` ${error.hint}` })];
}

/** Shows what would be deleted and its size; deletes after confirmation. */
export function deleteDialog(ctx, run, done) {
  const size = h("p", { class: "muted", text: "Counting what it holds …" });
  const said = h("p", { role: "alert" });
  const cancel = h("button", { class: "button quiet", type: "button", text: "Keep it", on: { click: () => dialog.close() } });
  const go = h("button", { class: "button danger", type: "button", text: "Delete for good", on: { click: remove } });
  const dialog = opened("Delete a run",
    h("h2", {}, "Delete the run ", h("span", { class: "name", text: run.name }), "?"),
    h("p", { class: "small muted name", text: run.id }), size,
    h("p", { text: "Its records, findings and tags go from the store, its tape with them. This cannot be undone; other runs stay as they are." }),
    said, h("div", { class: "row" }, cancel, go));
  cancel.focus();
  ctx.api.get(of(run.id, "contents")).then((told) => {
    size.textContent = `${number(told.rounds)} rounds, ${number(told.records)} records, about ${bytes(told.bytes)}${told.tape_bytes ? `; a tape of ${bytes(told.tape_bytes)}` : ""}.`;
  }, (error) => fill(size, trouble(error)));

  async function remove() {
    go.disabled = true;
    fill(said, h("span", { class: "muted", text: "Deleting …" }));
    try {
      const gone = await ctx.api.send("DELETE", of(run.id));
      dialog.close();
      announce(`Deleted ${gone.name}.`);
      done(run.id);
    } catch (error) {
      go.disabled = false;
      fill(said, trouble(error));
    }
  }
}

/** Tags of a run: a word and Enter adds one, a click removes one. */
export function tagDialog(ctx, run, known, done) {
  let tags = run.tags;
  const list = h("div", { class: "row", "aria-live": "polite" });
  const said = h("p", { role: "alert" });
  const words = h("datalist", { id: "known-tags" }, known.map((tag) => h("option", { value: tag })));
  const input = h("input", { class: "field", list: "known-tags", maxlength: LONGEST, "aria-label": "New tag", placeholder: "new tag", autocomplete: "off" });
  const dialog = opened("Tags of a run",
    h("h2", {}, "Tags of ", h("span", { class: "name", text: run.name })), list,
    h("form", { class: "row", on: { submit: add } }, input, h("button", { class: "button", text: "Add" })), words, said,
    h("div", { class: "row" }, h("button", { class: "button quiet", type: "button", text: "Done", on: { click: () => dialog.close() } })));
  show();
  input.focus();

  function show() {
    fill(list, tags.length ? tags.map((tag) => h("span", { class: "tag" }, tag,
      h("button", { class: "tag-off", type: "button", "aria-label": `Remove the tag ${tag}`, text: "×", on: { click: () => change("DELETE", tag) } })))
      : h("span", { class: "muted", text: "No tag yet." }));
  }

  async function change(method, tag) {
    try {
      tags = (await ctx.api.send(method, of(run.id, "tags", tag))).tags;
      fill(said);
      show();
      done();
      return true;
    } catch (error) {
      fill(said, trouble(error));
      return false;
    }
  }

  async function add(event) {
    event.preventDefault();
    const word = input.value.trim();
    if (word && (await change("PUT", word))) input.value = "";
    input.focus();
  }
}
