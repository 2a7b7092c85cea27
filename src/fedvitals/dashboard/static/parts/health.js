// SPDX-License-Identifier: Apache-2.0
// A run's health as a shape, a colour and a word; and its progress. Never by colour alone.

import { h } from "../dom.js";
import { ago, number, when } from "../format.js";

export const HEALTH = {
  ill: ["▲", "sev-warning", "problem"],
  watch: ["·", "sev-note", "watch"],
  healthy: ["✓", "sev-ok", "OK"],
  warming: ["◌", "muted", "too early"],
  unjudged: ["◐", "sev-unjudged", "not judged"],
};

export function healthMark(health, findings) {
  const [shape, colour, word] = health === "ill" && findings?.critical ? ["■", "sev-critical", "problem"] : (HEALTH[health] ?? HEALTH.unjudged);
  return h("span", { class: `health ${colour}` }, h("span", { class: "shape", "aria-hidden": "true", text: shape }), word);
}

/** «■ 1 ▲ 2 · 3», for the existing ones. */
export function findingCounts(findings) {
  const kinds = [["critical", "■"], ["warning", "▲"], ["note", "·"]].filter(([kind]) => findings[kind]);
  if (!kinds.length) return [h("span", { class: "muted", text: "none" })];
  return kinds.map(([kind, shape]) => h("span", { class: `sev-${kind} count`, title: `${findings[kind]} ${kind}` },
    h("span", { class: "shape", "aria-hidden": "true", text: shape }), number(findings[kind]), h("span", { class: "unseen", text: ` ${kind} ` })));
}

/** A run's state, in words. */
export function stateNow(run, now = Date.now() / 1000) {
  if (run.finished !== null) return { state: "finished", text: "", title: `finished ${when(run.finished)}` };
  const last = run.last_record ?? run.started;
  if (run.state === "silent" || run.state === "died") {
    const mark = run.state === "died" ? "✕ died" : "○ silent";
    const why = run.state === "died" ? "no end, and no process that writes to it" : "its process is there, and records nothing";
    return { state: run.state, text: `${mark}, last heard ${last === null ? "at its start" : ago(last, now)}`, title: `${why}; last record ${when(last)}` };
  }
  return { state: "running", text: "● live", title: last === null ? "no record yet" : `last record ${ago(last, now)}` };
}
