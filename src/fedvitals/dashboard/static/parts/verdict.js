// SPDX-License-Identifier: Apache-2.0
// The verdict: one sentence on top of a run, its evidence and links to more.

import { SHAPES } from "../colour.js";
import { fill, h } from "../dom.js";
import { runLink } from "../params.js";
import { causeLevels } from "./finding_parts.js";
import { nameOf } from "./who.js";

// Each state has a word, a shape and a colour: never the colour alone.
const STATES = {
  ill: ["PROBLEM", "■", "critical"],
  watch: ["WATCH", "▲", "warning"],
  healthy: ["OK", "✓", "ok"],
  warming: ["TOO EARLY", "◌", "muted"],
  different: ["DIFFERENT", "◇", "note"],
  unjudged: ["NOT JUDGED", "◐", "unjudged"],
};

const PARTLY = "No findings, but not fully examined: ";

export function verdictBox() {
  const mark = h("span", { class: "verdict-state" });
  const headline = h("h1", { class: "verdict-headline" });
  const [why, next, detail] = [h("p", { class: "verdict-why" }), h("p", { class: "verdict-next" }), h("span", { class: "verdict-detail" })];
  const levels = h("div", {});
  const links = h("span", { class: "verdict-links" });
  const node = h("section", { class: "verdict", "aria-label": "Verdict" },
    h("div", { class: "verdict-line" }, mark, headline), why, levels, next, h("p", { class: "verdict-more" }, detail, links));
  let said = null;

  return {
    node,
    /** `severity`: of the case behind it; a run with only warnings is marked as in the list of runs. */
    show(run, verdict, severity = null) {
      const now = JSON.stringify([run, verdict, severity]);
      if (now === said) return; // unchanged text is not read out again
      said = now;
      const [word, usual, hue] = STATES[verdict.state] ?? STATES.unjudged;
      const partly = verdict.state === "unjudged" && verdict.headline.startsWith(PARTLY);
      const own = verdict.state === "ill" && severity !== null;
      const [shape, colour] = own ? [SHAPES[severity] ?? usual, severity] : [usual, hue];
      node.className = `verdict verdict-${verdict.state}`;
      fill(mark, h("span", { "aria-hidden": "true", text: `${shape} ` }), partly ? "NOT FULLY JUDGED" : word);
      mark.className = `verdict-state ${colour === "muted" ? "muted" : `sev-${colour}`}`;
      headline.textContent = plain(verdict.headline, verdict.state);
      detail.textContent = verdict.detail;
      why.textContent = verdict.why ?? "";
      why.hidden = !verdict.why;
      fill(next, h("b", { text: "Next step: " }), verdict.next_step);
      next.hidden = !verdict.next_step;
      fill(levels, causeLevels(verdict.levels ?? []));
      const finding = verdict.key && runLink(run, "findings", verdict.key);
      fill(links,
        finding && h("a", { href: finding, text: "evidence" }),
        verdict.node && h("a", { href: runLink(run, "clients", verdict.node) }, nameOf(verdict.node), "’s page"),
        finding && h("a", { href: `${finding}#remedies`, text: "what to do" }));
    },
  };
}

/** «Healthy.» and «No findings» are shown by the mark beside it already. */
function plain(headline, state) {
  const word = { healthy: "Healthy. ", unjudged: PARTLY }[state];
  if (!word || !headline.startsWith(word)) return headline;
  const rest = headline.slice(word.length);
  return rest.charAt(0).toUpperCase() + rest.slice(1);
}
