// SPDX-License-Identifier: Apache-2.0
// Gradients and weights: the layers over the rounds as a heat map, and the gradient scale coefficient on a log axis.

import { decodeGrid } from "../api.js";
import { heatMap } from "../charts/heatmap.js";
import { lineChart } from "../charts/lines.js";
import { h } from "../dom.js";
import { go, link, runLink } from "../params.js";
import { ask, bandFrame, chooser, clientLines, closer, COLUMNS, globalLine, POINTS, remade, shownOf } from "./band.js";
import { empty } from "./states.js";

const HEIGHT = 280; // height of the map in pixels; for very deep models it scrolls
const FIRST = ["gradient", "update", "weight", "activation"]; // families, in the order of interest
const USUAL = ["l2", "norm_mean", "cosine_mean", "dead_fraction"]; // their default statistics
const WORDS = {
  l2: "L2 norm", rms: "root mean square", absmax: "largest magnitude", mean_magnitude: "mean magnitude", std: "standard deviation",
  sum_squares: "sum of squares", sum_magnitudes: "sum of magnitudes", norm_mean: "mean step norm", norm_max: "largest step norm",
  dead_fraction: "share of dead units", saturated_fraction: "share of saturated units", sign_diversity: "sign diversity",
};
// Sizes range over powers of ten; shares and cosines do not.
const LOG = new Set(["l2", "rms", "absmax", "mean_magnitude", "std", "sum_squares", "sum_magnitudes", "norm_mean", "norm_max", "norm_sum", "norm_last"]);
const SIGNED = new Set(["mean", "sum", "min", "max", "cosine_mean", "cosine_previous"]);

export function layerBand(ctx, axis) {
  const [map, scale, none] = [h("div", {}), h("div", {}), h("div", {})];
  const family = chooser(ctx, "of", "family");
  const statistic = chooser(ctx, "show", "statistic");
  const frame = bandFrame("gradients", "and weights, by layer", [statistic.node, family.node], none, map, scale);
  none.append(empty("No layer statistics were measured.", "They need a model and privacy level 3."));
  const layers = remade(map, (host, how) => heatMap(host, {
    ...how, axis, maxHeight: HEIGHT,
    onCell: (row, round) => go(link(runLink(ctx.run, "layers"), { layer: row, round, family: ctx.params.get("family") })),
    rowHref: (row) => link(runLink(ctx.run, "layers"), { layer: row, family: ctx.params.get("family") }),
  }));
  const gsc = lineChart(scale, {
    title: "gradient scale coefficient", unit: "1", axis, height: 132, scale: "log0",
    onRound: (round) => go(runLink(ctx.run, "rounds", round)),
  });

  let usual = null; // family and statistic unless the user chooses: requested once, so that a chart does not change

  function chosen(now) {
    const names = now.families.map((one) => one.name);
    if (names.length) usual ??= now.family ? [now.family, now.statistic] : [FIRST.find((one) => names.includes(one)) ?? names[0], null];
    const wanted = ctx.params.get("family");
    const name = names.includes(wanted) ? wanted : usual?.[0];
    const known = now.families.find((one) => one.name === name)?.statistics ?? [];
    const asked = [ctx.params.get("statistic"), usual && name === usual[0] && usual[1], ...USUAL, known[0]];
    return { family: name, statistic: asked.find((one) => known.includes(one)), known, names };
  }

  function drawMap(grid, now, { family: name, statistic: what }) {
    const words = WORDS[what] ?? what.replaceAll("_", " ");
    layers.with({
      title: `${words} of ${name.replaceAll(".", ", ")} by layer`,
      colours: SIGNED.has(what) ? "signed" : "even",
      log: LOG.has(what),
      rowHeight: Math.max(4, Math.min(14, Math.floor(HEIGHT / grid.rows.length))), // all layers at a glance
    }).update({
      grid: decodeGrid(grid),
      flags: now.flags,
      marks: now.cases.filter((one) => one.layer && !one.muted && one.since !== null)
        .map((one) => ({ row: one.layer, from: one.since, to: one.still_there ? now.last_round : one.last, severity: one.severity })),
      note: ["in the order of the model", shownOf(grid.columns.length, grid.total_columns)].filter(Boolean).join("; "),
    });
  }

  return {
    node: frame.node,

    follow(now, signal) {
      const choice = chosen(now);
      none.hidden = Boolean(choice.family) || Boolean(now.scale);
      map.hidden = !choice.family;
      scale.hidden = !now.scale;
      family.node.hidden = statistic.node.hidden = !choice.family;
      if (choice.family) {
        family.show([["", choice.names.map((name) => [name, name])]], choice.family);
        statistic.show([["", choice.known.map((name) => [name, WORDS[name] ?? name.replaceAll("_", " ")])]], choice.statistic);
      }
      const part = { points: POINTS, ...closer(axis, POINTS) };
      frame.fill(() => Promise.all([
        choice.family && ask(ctx, "layer-grid", { family: choice.family, statistic: choice.statistic, columns: COLUMNS, ...closer(axis, COLUMNS) }, signal),
        now.scale && ask(ctx, "band", { sign: now.scale, ...part }, signal),
        now.scale ? ask(ctx, "series", { names: [now.scale], ...part }, signal) : [],
        now.scale && now.lines.length ? ask(ctx, "series", { names: [now.scale], nodes: now.lines, ...part }, signal) : [],
      ]), ([grid, cohort, whole, own]) => {
        if (grid) drawMap(grid, now, choice);
        if (cohort) {
          gsc.update({
            bands: cohort.rounds.length ? [{ ...cohort, name: "clients" }] : [],
            series: [...globalLine(whole[0]), ...clientLines(ctx.run, own, now.lines)],
            flags: now.flags,
            note: ["GSC, log axis, zero below it", shownOf(cohort.rounds.length, cohort.total)].filter(Boolean).join("; "),
          });
        }
      });
    },

    destroy() {
      layers.destroy();
      gsc.destroy();
    },
  };
}
