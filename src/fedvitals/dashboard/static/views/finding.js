// SPDX-License-Identifier: Apache-2.0
// One finding: «can I trust it?» Its evidence, how sure it is, what would prove it wrong, what to do about it.

import { of } from "../api.js";
import { Axis, bindAxis } from "../charts/axis.js";
import { fill, h } from "../dom.js";
import { go, link, runLink } from "../params.js";
import { evidencePlots } from "../parts/evidence_plots.js";
import { numbersTable, suspectBars, trustBox, actionList, errorBox } from "../parts/finding_parts.js";
import { findingMarks, findingTags, severityMark } from "../parts/finding_marks.js";

export const title = "Finding";

export function view(root, ctx) {
  const { run, params } = ctx;
  const key = ctx.path.key;
  const axis = new Axis({ from: ctx.status.first_round ?? 0, to: ctx.status.last_round ?? 0 });
  const unbind = bindAxis(axis, params);
  const marks = findingMarks(ctx);
  const head = h("div", { class: "finding-top" });
  const plots = evidencePlots(axis, (round) => go(runLink(run, "rounds", round)));
  const [numbers, error, more, trust, suspects, causes, remedies, refutation, actions, links] = Array.from({ length: 10 }, () => h("div", {}));
  root.append(
    h("p", {}, h("a", { href: runLink(run, "findings"), text: "‹ all findings" })),
    h("div", { class: "finding-title" }, head, marks.node),
    h("div", { class: "page finding-page" },
      h("div", { class: "stack" },
        section("evidence", "evidence", plots.node),
        section("numbers", "the numbers of the newest finding", h("div", { class: "scroll-x" }, numbers)),
        section("error", "the error itself", error),
        section("more", "other evidence", more)),
      h("aside", { "aria-label": "Judgement" },
        section("trust", "how sure", trust),
        section("suspects", "suspects", suspects),
        section("refutation", "what would prove it wrong", refutation),
        section("causes", "likely causes, the likeliest first", causes),
        section("remedies", "what to do", remedies),
        section("actions", "what was done", actions),
        section("links", "where to look further", links))));
  const trouble = h("p", { class: "muted", role: "status" });
  plots.node.prepend(trouble);
  let [told, accused] = ["", []];

  /** The charts follow the text: they take longer to compute. */
  async function picture(one) {
    try {
      const evidence = await ctx.api.get(of(run, "findings", key, "evidence"), {}, ctx.signal);
      fill(trouble);
      plots.show(one, evidence);
      part(links, further(run, one, evidence, accused));
    } catch (error) {
      if (error.name !== "AbortError") trouble.textContent = `The pictures could not be drawn: ${error.message}`;
      if (error.name !== "AbortError" && error.status === undefined) console.error(error);
    }
  }

  return {
    load: (signal) => ctx.api.get(of(run, "findings", key), {}, signal),

    show(found) {
      const one = found.case;
      marks.show(one);
      if (ctx.status.last_round !== null) axis.extend(ctx.status.first_round, ctx.status.last_round);
      accused = found.suspects;
      picture(one);
      const now = JSON.stringify(found);
      if (now === told) return;
      const first = told === "";
      told = now;
      fill(head,
        h("div", { class: "finding-head" }, severityMark(one), h("span", { class: "muted", text: one.issue }), findingTags(one)),
        h("h1", { text: one.sentence }),
        h("p", { class: "muted", text: `${one.place}, ${one.timeline}.` }),
        h("p", { class: "finding-message", text: one.message }),
        found.symptom && h("p", { class: "small muted", text: found.symptom }));
      part(numbers, found.numbers.length && numbersTable(found.numbers));
      part(error, found.error && errorBox(found.error));
      part(more, found.more.length && h("details", {}, h("summary", { class: "small muted", text: "as the detector wrote it down" }),
        h("dl", { class: "facts-list" }, found.more.map(([name, text]) => [h("dt", { text: name }), h("dd", { text })]))));
      part(trust, trustBox(one, found));
      part(suspects, found.suspects.length && suspectBars(run, found.suspects, one.severity));
      part(refutation, found.refutation && h("p", { text: found.refutation }));
      part(causes, found.causes.length && h("ol", {}, found.causes.map((text) => h("li", { text }))));
      part(remedies, found.remedies.length && h("ol", {}, found.remedies.map((text) => h("li", { text }))));
      part(actions, actionList(found.actions));
      if (first && location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
    },

    destroy() {
      unbind();
      plots.destroy();
    },

    keys: {
      a: Object.assign(() => marks.acknowledge(), { label: "acknowledge it" }),
      m: Object.assign(() => marks.mute(), { label: "mute it" }),
      u: Object.assign(() => go(runLink(run, "findings")), { label: "all findings" }),
    },
  };
}

function section(id, name, body) {
  return h("section", { class: "panel", id, "aria-label": name }, h("h2", { text: name }), body);
}

/** Fills a section, which is hidden if it has no content. */
function part(body, content) {
  fill(body, content || null);
  body.closest("section").hidden = !content;
}

/** Links to the round in which it began, and to its node: there every part can be examined, and run again. */
function replayOf(run, one, suspects) {
  const round = one.since ?? one.first ?? one.last;
  const node = one.node ?? suspects[0]?.node ?? null;
  return h("a", { class: "replay-this", href: link(runLink(run, "replay"), { round, node }), text: `replay this${round === null ? "" : `: round ${round}`}${node === null ? "" : `, ${one.label || node}`}` });
}

function further(run, one, evidence, suspects) {
  const records = (params) => link(of(run, "records"), params);
  const metrics = [...new Set(evidence.plots.map((plot) => plot.metric).filter(Boolean))];
  return h("ul", { class: "plain-list" },
    one.node !== null && h("li", {}, h("a", { href: runLink(run, "clients", one.node), text: `${one.label || one.node}, against the other clients` })),
    one.last !== null && h("li", {}, h("a", { href: runLink(run, "rounds", one.last), text: `round ${one.last}, in which it was seen last` })),
    one.since !== null && one.since !== one.last && h("li", {}, h("a", { href: runLink(run, "rounds", one.since), text: `round ${one.since}, the first of it` })),
    one.layer !== null && h("li", {}, h("a", { href: link(runLink(run, "layers"), { layer: one.layer }), text: `layer ${one.layer}` })),
    h("li", {}, h("a", { href: records({ kind: "finding", node: one.node, round: one.last }), text: "raw records: findings" })),
    metrics.map((name) => h("li", {}, h("a", { href: records({ kind: "metric", name, node: one.node }), text: `raw records: ${name}` }))),
    h("li", {}, replayOf(run, one, suspects)));
}
