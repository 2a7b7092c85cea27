// SPDX-License-Identifier: Apache-2.0
// The overview of a run, read like a patient's chart: the verdict, the vital signs on one axis, the suspects beside.
// The verdict and the learning curves come first; the heat maps follow as they arrive.

import { of } from "../api.js";
import { Axis, bindAxis } from "../charts/axis.js";
import { onTheme } from "../colour.js";
import { fill, h } from "../dom.js";
import { runLink } from "../params.js";
import { clientBand } from "../parts/band_clients.js";
import { layerBand } from "../parts/band_layers.js";
import { learningBand } from "../parts/band_learning.js";
import { systemBand } from "../parts/band_system.js";
import { findingList } from "../parts/finding_list.js";
import { empty } from "../parts/states.js";
import { suspectList } from "../parts/suspects.js";
import { verdictBox } from "../parts/verdict.js";

export const title = "Overview";
const FLAGS = 40; // findings on the axis; with more, the worst
const LINES = 4; // suspects on top of the cohort: more would be unreadable

export function view(root, ctx) {
  const { run, params } = ctx;
  const axis = new Axis({ from: ctx.status.first_round ?? 0, to: ctx.status.last_round ?? 0 });
  const unbind = bindAxis(axis, params);
  const verdict = verdictBox();
  const findings = findingList();
  const suspects = suspectList((node) => params.set({ client: node }));
  const bands = [learningBand(ctx, axis), layerBand(ctx, axis), clientBand(ctx, axis), systemBand(ctx, axis)];
  const follow = h("button", { class: "button follow", hidden: true, on: { click: () => axis.reset() } });
  const none = h("div", {});
  let learning = null; // the sign below the accuracy: requested once, so that a chart does not change
  root.append(h("div", { class: "page overview" },
    verdict.node,
    h("aside", { "aria-label": "Findings and suspects" }, findings.node, suspects.node),
    h("div", { class: "bands" }, none, bands.map((one) => one.node), follow)));

  function offerFollow() {
    const live = ctx.status.state === "running";
    follow.hidden = axis.whole;
    follow.textContent = live ? "follow the run" : "all rounds";
    follow.title = live ? "Show all rounds, and new ones as they come" : "Show all rounds";
  }
  const unlisten = axis.on((what) => what !== "hover" && offerFollow());
  const untheme = onTheme(() => ctx.refresh?.()); // the colours of clients are part of the data

  return {
    load(signal) {
      return Promise.all([ctx.api.get(of(run, "overview"), {}, signal), bands[0].load(signal)]);
    },

    show([overview, learnt]) {
      if (overview.first_round !== null) axis.extend(overview.first_round, overview.last_round);
      const chosen = params.get("client");
      verdict.show(run, overview.verdict, severityOf(overview));
      findings.show(run, overview.cases, overview.total_cases, overview.muted);
      suspects.show(run, overview.suspects, overview.clients, chosen);
      fill(none, overview.first_round === null && empty("No round yet.", "The pictures appear with the first one, by themselves."));
      learning ??= overview.learning;
      const shared = { ...overview, learning, chosen, flags: flagsOf(run, overview), lines: linesOf(overview, chosen) };
      bands[0].show(learnt, shared);
      offerFollow();
      for (const one of bands) one.node.hidden = overview.first_round === null;
      if (overview.first_round !== null) for (const one of bands) one.follow(shared, ctx.signal);
    },

    destroy() {
      unbind();
      unlisten();
      untheme();
      for (const one of bands) one.destroy();
    },
  };
}

/** Of the verdict's case. */
function severityOf({ verdict, cases }) {
  return cases.find((one) => one.key === verdict.key)?.severity ?? null;
}

/** Every finding that is not muted, where it began and as long as it lasted. */
function flagsOf(run, overview) {
  return overview.cases
    .filter((one) => !one.muted && one.since !== null)
    .slice(0, FLAGS)
    .map((one) => ({
      round: one.since,
      until: one.still_there ? overview.last_round : one.last,
      severity: one.severity,
      label: `${one.label || (one.node ?? one.layer ?? one.place)}: ${one.title}`,
      href: runLink(run, "findings", one.key),
    }));
}

/**
 * The clients with their own lines: the most suspected, and the user's selection. Each keeps its colour in all charts.
 */
function linesOf(overview, chosen) {
  const suspected = overview.suspects.filter((one) => one.severity !== "note").map((one) => one.node);
  const first = suspected.slice(0, chosen && !suspected.slice(0, LINES).includes(chosen) ? LINES - 1 : LINES);
  return [...new Set([...first, ...(chosen ? [chosen] : [])])];
}
