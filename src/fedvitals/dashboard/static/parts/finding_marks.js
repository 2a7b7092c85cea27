// SPDX-License-Identifier: Apache-2.0
// The user's marks of a finding: «I know», or «do not count it», with a reason. Kept in the store for everybody.

import { access, changing } from "../access.js";
import { of } from "../api.js";
import { announce, fill, h } from "../dom.js";

const LONGEST = 500;

/** Buttons for one finding. They stay as they are while a reason is being typed, whatever arrives in the meantime. */
export function findingMarks(ctx) {
  const buttons = h("span", { class: "row" });
  const trouble = h("span", { class: "sev-critical small", role: "alert" });
  const node = h("div", { class: "finding-marks" }, buttons, trouble);
  let one = null;
  let asking = false;

  async function say(method, kind, body, told) {
    if (!access.changes) return; // by a key: the buttons are disabled, with the reason
    fill(trouble);
    try {
      await ctx.api.send(method, of(ctx.run, "findings", one.key, kind), body);
      asking = false;
      announce(told);
      await ctx.refresh();
    } catch (error) {
      trouble.textContent = error.message;
    }
  }

  const acknowledge = () =>
    one.acknowledged ? say("DELETE", "acknowledged", undefined, "No longer acknowledged.") : say("PUT", "acknowledged", undefined, "Acknowledged.");

  function mute() {
    if (!access.changes) return;
    if (one.muted) {
      say("DELETE", "muted", undefined, "Counts again.");
      return;
    }
    asking = true;
    draw();
    node.querySelector("input").focus();
  }

  function stop() {
    asking = false;
    draw();
    node.querySelector("[data-act='mute']").focus();
  }

  function form() {
    const reason = h("input", { class: "field reason-field", "aria-label": "Why it is muted", placeholder: "why? (kept with it)", maxlength: LONGEST });
    reason.addEventListener("keydown", (event) => event.key === "Escape" && stop());
    return h("form", {
      class: "row", on: {
        submit: (event) => {
          event.preventDefault();
          say("PUT", "muted", { reason: reason.value }, "Muted.");
        },
      },
    }, reason, h("button", { class: "button", text: "Mute" }), h("button", { class: "button quiet", type: "button", text: "Cancel", on: { click: stop } }));
  }

  function draw() {
    fill(buttons, asking ? form() : [
      h("button", changing({
        class: "button quiet", data: { act: "acknowledge" }, "aria-pressed": String(one.acknowledged),
        title: "Somebody knows of it; it still counts", text: one.acknowledged ? "✓ acknowledged" : "acknowledge", on: { click: acknowledge },
      })),
      h("button", changing({
        class: "button quiet", data: { act: "mute" }, "aria-pressed": String(one.muted),
        title: "It does not count in the verdict any more", text: one.muted ? "unmute" : "mute …", on: { click: mute },
      })),
    ]);
  }

  return {
    node,
    acknowledge,
    mute,
    show(finding) {
      const changed = !one || one.key !== finding.key || one.acknowledged !== finding.acknowledged || one.muted !== finding.muted;
      one = finding;
      if (!changed || asking) return;
      const focused = node.contains(document.activeElement) ? document.activeElement.dataset.act : null;
      draw();
      if (focused) node.querySelector(`[data-act='${focused}']`)?.focus();
    },
  };
}

/** Shape, colour and word of a severity. */
export function severityMark(one) {
  const shape = { critical: "■", warning: "▲", note: "·" }[one.severity] ?? "·";
  return h("span", { class: `severity sev-${one.severity}` }, h("span", { "aria-hidden": "true", text: `${shape} ` }), one.severity);
}

/** What is special about it: over, back again, known, muted. */
export function findingTags(one) {
  return [
    !one.still_there && h("span", { class: "tag", text: "resolved" }),
    one.returned > 0 && h("span", { class: "tag", text: one.returned === 1 ? "returned" : `returned ${one.returned} times` }),
    one.acknowledged && h("span", { class: "tag", text: "✓ acknowledged" }),
    one.muted && h("span", { class: "tag", text: one.reason ? `muted: ${one.reason}` : "muted", title: one.reason }),
  ];
}
