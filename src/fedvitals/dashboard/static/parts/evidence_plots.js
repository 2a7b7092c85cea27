// SPDX-License-Identifier: Apache-2.0
// The charts behind a finding, on one axis: the suspect over its cohort, flags where it was seen, and its confidence.

import { lineChart } from "../charts/lines.js";
import { h, keyed } from "../dom.js";
import { lineOf, remade, shownOf } from "./band.js";
import { empty } from "./states.js";

export function evidencePlots(axis, onRound) {
  const hosts = h("div", { class: "stack" });
  const sure = h("div", {});
  const none = h("div", { hidden: true }, empty("Nothing that was measured over the rounds stands behind it."));
  sure.hidden = true;
  const node = h("div", { class: "stack evidence" }, none, hosts, sure);
  const confidence = lineChart(sure, { title: "confidence", unit: "share", axis, height: 96, onRound });

  return {
    node,

    show(one, evidence) {
      const { plots, seen, confidences } = evidence;
      const flags = seenFlags(one, evidence);
      none.hidden = plots.length > 0;
      keyed(hosts, plots, (plot) => plot.id,
        () => {
          const host = h("div", {});
          const why = h("p", { class: "small muted" });
          const place = h("div", {}, host, why);
          place.chart = remade(host, (at, how) => lineChart(at, { ...how, axis, height: 220, onRound }));
          place.why = why;
          return place;
        },
        (place, plot) => {
          place.why.textContent = [plot.why, plot.meaning].filter(Boolean).map(sentence).join(" ");
          place.chart.with({ title: plot.title, unit: plot.unit ?? "", scale: plot.scale }).update({
            series: plot.lines.map((line, at) => lineOf(line, { name: line.of, index: 1 + at })),
            bands: plot.band ? [{ ...plot.band, name: others(plot) }] : [],
            flags,
            threshold: plot.threshold,
            note: noteOf(plot),
          });
        });
      sure.hidden = seen.length < 2;
      confidence.update({ series: [{ name: "confidence", rounds: seen, values: confidences }], flags });
    },

    destroy() {
      for (const place of hosts.children) place.chart.destroy();
      confidence.destroy();
    },
  };
}

/** A formula such as «cos(d_i, …)» or «α/r» keeps its lower-case letter. */
function sentence(text) {
  const begun = /^[a-z]+[ ,.]/.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return begun.endsWith(".") ? begun : `${begun}.`;
}

/** Neighbouring rounds in which it was seen share one flag; the first begins with the finding, as on the overview. */
function seenFlags(one, { seen, since }) {
  const flags = [];
  for (const round of seen) {
    const last = flags.at(-1);
    if (last && round === last.until + 1) last.until = round;
    else flags.push({ round, until: round, severity: one.severity, label: `${one.title}: seen` });
  }
  if (since !== null && flags.length && since < flags[0].round) {
    flags[0].label = `${one.title}: began, first seen in round ${flags[0].round}`;
    flags[0].round = since;
  }
  return flags;
}

/** The members of the band: a suspect is not among the others. */
const others = (plot) => (plot.lines.some((line) => line.node !== null) ? "other clients" : "clients");

function noteOf(plot) {
  const clients = plot.band ? `${Math.max(...plot.band.clients)} ${others(plot)}: p5–p95, median, extremes` : "";
  const line = plot.lines[0];
  return [clients, line && shownOf(line.rounds.length, line.total)].filter(Boolean).join("; ");
}
