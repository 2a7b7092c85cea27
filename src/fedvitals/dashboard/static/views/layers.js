// SPDX-License-Identifier: Apache-2.0
// Layers: where does the gradient die or explode? Through the depth, over the rounds, and as the paper draws it.

import { decodeGrid, of } from "../api.js";
import { Axis, bindAxis, heatMap, lineChart } from "../charts/index.js";
import { mapColour, onTheme, theme } from "../colour.js";
import { fill, h } from "../dom.js";
import { runLink } from "../params.js";
import { ask, chooser, closer, COLUMNS, lineOf, POINTS, remade, shownOf } from "../parts/band.js";
import { distributionPanel } from "../parts/distribution.js";
import { empty } from "../parts/states.js";

export const title = "Layers";
const NAMES = { "scale.gsc": "gradient scale coefficient", "scale.sensitivity": "sensitivity (Philipp’s numbering)", "nonlinearity.nlc": "nonlinearity coefficient" };

export function view(root, ctx) {
  const { run, params } = ctx;
  const axis = new Axis({ from: ctx.status.first_round ?? 0, to: ctx.status.last_round ?? 0 });
  const unbind = bindAxis(axis, params);
  const [headline, missing] = [h("p", { class: "said" }), h("ul", { class: "missing muted small" })];
  const [family, statistic] = [chooser(ctx, "of", "family"), chooser(ctx, "show", "statistic")];
  const node = nodeField(params);
  const every = h("input", { type: "checkbox", on: { change: () => params.set({ all: every.checked ? "true" : null }) } });
  const [depth, map] = [h("div", {}), h("div", {})];
  const [signed, size, deadUnits, scales] = [h("div", {}), h("div", {}), h("div", { class: "split" }), h("div", { class: "split" })];
  const shape = distributionPanel(ctx);
  root.append(
    h("div", { class: "head asking" }, h("h1", { text: "Layers" }), h("span", { class: "muted", text: "where does the gradient die or explode?" })),
    headline,
    h("div", { class: "row controls" }, statistic.node, family.node, node.node, h("label", { class: "field-label" }, every, "biases and norms too")),
    h("div", { class: "split wide-split" }, depth, shape.node),
    h("section", { class: "panel" }, map),
    h("section", { class: "panel" }, h("h2", { text: "gradient scale" }), scales),
    h("section", { class: "panel" }, h("h2", { text: "average gradient per layer, as in the paper" }), h("div", { class: "split" }, signed, size)),
    h("section", { class: "panel" }, h("h2", { text: "dead and saturated units" }), deadUnits),
    missing);

  const select = (layer, round) => params.set({ layer, round });
  const profile = remade(depth, (host, how) => lineChart(host, { ...how, height: 330 }));
  const heat = remade(map, (host, how) => heatMap(host, { ...how, axis, rowHeight: 15, maxHeight: 420, onCell: select, selected: (row) => row === params.get("layer") }));
  const onRound = (round) => params.set({ round });
  const mean = lineChart(signed, { title: "mean, with its sign", unit: "1", axis, height: 180, onRound });
  const magnitude = lineChart(size, { title: "mean magnitude", unit: "1", axis, height: 180, scale: "log0", onRound });
  const units = new Map();
  const curves = new Map();
  let drawn = null;
  const repaint = onTheme(() => drawn && drawProfile(drawn));

  function drawProfile(found) {
    drawn = found;
    const known = found.statistics.find((one) => one.name === found.statistic);
    const { layers, lines, rounds } = found.profile;
    const chosen = params.number("round");
    const zero = lines.some((one) => one.values.includes(0));
    const scale = known.scale === "log" ? (zero ? "log0" : "log") : "linear";
    profile.with({ title: `${found.family}: ${known.meaning.split(":")[0]} through the depth`, unit: "1", scale }).update({
      xs: { labels: layers },
      series: lines.map((one, i) => ({
        name: `round ${one.round}`, rounds: layers.map((_, at) => at), values: one.values,
        ...(one.round === chosen ? { colour: theme().ink, dash: true } : { colour: age(lines.length > 1 ? i / (lines.length - 1) : 1) }),
      })),
      note: [`one line a round, ${theme().dark ? "grey" : "ochre"} is early, ${theme().dark ? "yellow" : "dark blue"} late${rounds > lines.length ? `; ${lines.length} of ${rounds} rounds` : ""}`,
        found.weights_only ? "weights only" : "", lines.some((one) => one.round === chosen) ? `dashed: round ${chosen}` : ""].filter(Boolean).join("; "),
    });
  }

  function drawMap(found) {
    const known = found.statistics.find((one) => one.name === found.statistic);
    heat.with({
      title: `${known.meaning.split(":")[0]} of ${found.family} by layer`,
      colours: known.scale === "signed" ? "signed" : "even", log: known.scale === "log",
    }).update({
      grid: decodeGrid(found.grid), flags: [],
      note: ["in the order of the model; a cell chooses layer and round", shownOf(found.grid.columns.length, found.grid.total_columns),
        found.thinned ? `${found.grid.total_columns} of ${found.total_rounds} rounds were read` : ""].filter(Boolean).join("; "),
    });
  }

  function drawAverages(found) {
    const own = found.averages;
    signed.parentNode.hidden = !own;
    if (!own) return;
    const note = own.layers.length < own.total ? `${own.layers.length} of ${own.total} weights, from the first to the last` : "weights only";
    const names = shortened(own.layers.map((one) => one.layer));
    const series = (name) => own.layers.map((one, i) => ({ name: names[i], rounds: own.rounds, values: one[name] }));
    mean.update({ series: series("mean"), note: `${note}; 0 by construction in a softmax head` });
    magnitude.update({ series: series("magnitude"), note });
  }

  function drawUnits(found) {
    if (!found.health.length) return fill(deadUnits, empty("Not measured.", 'Monitor(probes="deep") counts them.')), units.clear();
    if (!units.size) fill(deadUnits);
    for (const one of found.health) {
      if (!units.has(one.name)) {
        const host = h("div", {});
        deadUnits.append(host);
        units.set(one.name, heatMap(host, { title: `share of ${one.title}`, unit: "share", axis, rowHeight: 15, maxHeight: 300, colours: "even" }));
      }
      units.get(one.name).update({ grid: decodeGrid(one.grid), flags: [], note: "by module; measured within 2 % of the training time" });
    }
  }

  function drawScales(found, curvesNow) {
    if (!curves.size) fill(scales);
    for (const [i, one] of found.scales.entries()) {
      if (!curves.has(one.name)) {
        const host = h("div", {});
        scales.append(host);
        curves.set(one.name, { host, chart: null });
      }
      const place = curves.get(one.name);
      if (!one.measured) {
        fill(place.host, h("div", { class: "chart" }, h("div", { class: "chart-head" }, h("span", { class: "chart-title", text: NAMES[one.name] ?? one.meaning })), empty("Not measured.", `Needs ${one.needs}.`)));
        continue;
      }
      if (!place.chart) {
        fill(place.host);
        place.chart = lineChart(place.host, { title: NAMES[one.name] ?? one.meaning, unit: "1", axis, height: 170, scale: "log0", onRound });
      }
      const { band, series } = curvesNow[i];
      const earlier = one.name === "scale.gsc" ? found.earlier_scales : [];
      place.chart.update({
        bands: band?.rounds.length ? [{ ...band, name: "clients" }] : [],
        series: [
          ...series.map((line) => lineOf(line)),
          ...earlier.map((past, at) => ({ name: `${past.name} (earlier run)`, rounds: past.rounds, values: past.values, dash: true, index: 1 + at, href: runLink(past.run, "layers") })),
        ],
        note: [one.formula, shownOf(band?.rounds.length ?? 0, band?.total ?? 0)].filter(Boolean).join("; "),
      });
    }
  }

  return {
    async load(signal) {
      const chosen = params.get("node");
      const part = closer(axis, COLUMNS);
      const [found, spread] = await Promise.all([
        ctx.api.get(of(run, "layers"), {
          family: params.get("family"), statistic: params.get("statistic"), node: chosen, round: params.get("round"),
          all: params.get("all"), columns: COLUMNS, ...part,
        }, signal),
        shape.load(signal),
      ]);
      const near = { points: POINTS, ...closer(axis, POINTS) };
      const lines = await Promise.all(found.scales.map(async (one) => {
        if (!one.measured) return null;
        const band = await ask(ctx, "band", { sign: one.name, ...near }, signal);
        const own = chosen || !band.rounds.length; // if only the federation reports it, its line is all there is
        return { band, series: own ? await ask(ctx, "series", { names: [one.name], nodes: chosen ? [chosen] : [], ...near }, signal) : [] };
      }));
      return { found, spread, lines };
    },

    show({ found, spread, lines }) {
      if (ctx.status.first_round !== null) axis.extend(ctx.status.first_round, ctx.status.last_round);
      headline.textContent = found.headline;
      family.show([["", (found.families.length ? found.families : [found.family]).map((name) => [name, name])]], found.family);
      statistic.show([["", found.statistics.map((one) => [one.name, one.meaning.split(":")[0]])]], found.statistic);
      node.show(found.nodes, found.node);
      every.checked = params.get("all") === "true";
      drawProfile(found);
      drawMap(found);
      drawScales(found, lines);
      drawAverages(found);
      drawUnits(found);
      shape.show(spread);
      fill(missing, !found.profile.lines.length && found.missing.map((text) => h("li", { text })));
    },

    destroy() {
      unbind();
      repaint();
      for (const one of [profile, heat, mean, magnitude, shape, ...units.values()]) one.destroy();
      for (const one of curves.values()) one.chart?.destroy();
    },
  };
}

/** Early rounds light, late ones dark; the other way round in dark mode, so that the newest stands out. */
function age(share) {
  return theme().dark ? mapColour(0.3 + 0.7 * share) : mapColour(0.85 - 0.8 * share);
}

/** Names without their common beginning or end: «block0.conv.weight» … is «block0» … */
function shortened(names) {
  const parts = names.map((name) => name.split("."));
  const same = (at) => parts.every((one) => one.length > 1 && one.at(at) === parts[0].at(at));
  while (names.length > 1 && same(-1)) parts.forEach((one) => one.pop());
  while (names.length > 1 && same(0)) parts.forEach((one) => one.shift());
  return parts.map((one) => one.join("."));
}

/** A client to look at instead of the whole federation. */
function nodeField(params) {
  const names = h("datalist", { id: "layer-nodes" });
  const input = h("input", { class: "field", list: "layer-nodes", placeholder: "whole federation", size: 16, on: { change: () => params.set({ node: input.value.trim() || null }, { push: true }) } });
  const clear = h("button", { class: "link-button", type: "button", text: "whole federation", hidden: true, on: { click: () => params.set({ node: null }, { push: true }) } });
  let known = "";
  return {
    node: h("span", { class: "row" }, h("label", { class: "field-label" }, "node", input, names), clear),
    show(nodes, chosen) {
      const now = nodes.join("\n");
      if (now !== known) fill(names, nodes.map((name) => h("option", { value: name })));
      known = now;
      if (document.activeElement !== input) input.value = chosen ?? "";
      clear.hidden = !chosen;
    },
  };
}
