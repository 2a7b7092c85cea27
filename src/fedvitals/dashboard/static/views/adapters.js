// SPDX-License-Identifier: Apache-2.0
// Adapters: which directions are used, is B times A what the clients meant, and who contributes what?

import { decodeGrid, of } from "../api.js";
import { Axis, bindAxis, heatMap, lineChart } from "../charts/index.js";
import { fill, h } from "../dom.js";
import { chooser, COLUMNS } from "../parts/band.js";
import { empty } from "../parts/states.js";

export const title = "Adapters";
const SIGNS = {
  "perplexity.before": ["perplexity as training begins, by client", "1"],
  "perplexity.after": ["perplexity as training ends, by client", "1"],
  "tokens.length": ["tokens in a text, by client", "tokens"],
  "tokens.padding": ["padding, by client", "share"],
  "throughput.tokens": ["tokens per second, by client", "tokens/s"],
  "model.flops_utilisation": ["model FLOP utilisation, by client", "share"],
  "adapter.scale": ["α/r, by client", "1"],
};
const ALL = "all adapters, their mean";

export function view(root, ctx) {
  const { run, params } = ctx;
  const axis = new Axis({ from: ctx.status.first_round ?? 0, to: ctx.status.last_round ?? 0 });
  const unbind = bindAxis(axis, params);
  const directions = new Axis({ from: 1, to: 1, label: "direction" }); // it grows to as many as are in use
  const layer = chooser(ctx, "of", "layer");
  const [spectrum, ranks, used, errors, energies, moves, forgotten, parts] = Array.from({ length: 8 }, () => h("div", {}));
  const language = h("div", { class: "split" });
  const content = h("div", {},
    h("div", { class: "row controls" }, layer.node),
    h("section", { class: "panel" }, spectrum),
    h("div", { class: "split" }, used, errors, energies, moves, forgotten),
    h("section", { class: "panel" }, parts),
    h("section", { class: "panel" }, ranks),
    language);
  const none = h("div", {});
  root.append(
    h("div", { class: "head asking" }, h("h1", { text: "Adapters" }), h("span", { class: "muted", text: "which directions are used, and who contributes them?" })),
    content, none);

  const onRound = (round) => params.set({ round });
  const select = (name, round) => params.set({ layer: name, round });
  const heat = (host, how) => heatMap(host, { axis, rowHeight: 15, maxHeight: 300, colours: "even", ...how });
  const charts = {
    spectrum: heat(spectrum, { title: "energy by singular direction", unit: "share", onCell: (_, round) => onRound(round) }),
    ranks: heat(ranks, { title: "effective rank by adapter", unit: "1", onCell: select, selected: (row) => row === params.get("layer") }),
    parts: heat(parts, { title: "each client’s part in a direction", unit: "share", axis: directions, colours: "signed" }),
    used: lineChart(used, { title: "rank in use", unit: "1", axis, height: 180, onRound }),
    errors: lineChart(errors, { title: "how far B·A is from the mean of products", unit: "share", axis, height: 180, onRound }),
    energies: lineChart(energies, { title: "directions above the smallest rank", unit: "share", axis, height: 180, onRound }),
    moves: lineChart(moves, { title: "how far the merged weights moved", unit: "1", axis, height: 180, onRound }),
    forgotten: lineChart(forgotten, { title: "loss on texts that nobody trains on", unit: "nats", axis, height: 180, onRound }),
  };
  const clients = new Map();
  const lines = (curves) => curves.map(({ words, rounds, values }) => ({ name: words, rounds, values }));

  function drawClients(found) {
    for (const [name, grid] of Object.entries(found.clients)) {
      if (!clients.has(name)) {
        const host = h("div", {});
        language.append(host);
        const [words, unit] = SIGNS[name];
        clients.set(name, heat(host, { title: words, unit }));
      }
      clients.get(name).update({ grid: decodeGrid(grid), flags: [] });
    }
  }

  return {
    load: (signal) => ctx.api.get(of(run, "adapters"), { layer: params.get("layer"), round: params.get("round"), columns: COLUMNS }, signal),

    show(found) {
      if (ctx.status.first_round !== null) axis.extend(ctx.status.first_round, ctx.status.last_round);
      content.hidden = !found.layers.length;
      fill(none, !found.layers.length && empty("No low-rank adapters were measured.", found.trained ?? "They are those of the model in monitor.round(number, model)."));
      if (!found.layers.length) return;
      layer.show([["", [["", ALL], ...found.layers.map((name) => [name, name])]]], found.layer ?? "");
      charts.spectrum.update({ grid: decodeGrid(found.spectrum), flags: [], note: `shares of the energy of B·A${found.beyond ? ` in its first ${found.spectrum.rows.length} directions` : ""}; a round chooses whose parts are shown` });
      charts.ranks.update({ grid: decodeGrid(found.effective_rank), flags: [], note: "a cell chooses adapter and round" });
      parts.hidden = !found.contributions;
      if (found.contributions) charts.parts.update({ grid: decodeGrid(found.contributions), flags: [], note: `in round ${found.round}, by singular direction` });
      charts.used.update({ series: lines(found.ranks) });
      charts.errors.update({ series: lines(found.errors) });
      energies.hidden = !found.energies.length;
      charts.energies.update({ series: lines(found.energies), note: "where the clients’ ranks differ" });
      charts.moves.update({ series: lines(found.moves) });
      forgotten.hidden = !found.held_back.length;
      charts.forgotten.update({ series: lines(found.held_back) });
      drawClients(found);
    },

    destroy() {
      unbind();
      for (const one of [...Object.values(charts), ...clients.values()]) one.destroy();
    },
  };
}
