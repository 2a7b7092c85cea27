// SPDX-License-Identifier: Apache-2.0
// How the values of one layer's gradient were distributed, round by round: ridges if the shape is known.

import { of } from "../api.js";
import { lineChart, ridgelines } from "../charts/index.js";
import { fill, h } from "../dom.js";
import { percent } from "../format.js";
import { chooser } from "./band.js";
import { empty } from "./states.js";

export function distributionPanel(ctx) {
  const { run, params } = ctx;
  const layer = chooser(ctx, "layer", "layer");
  const [ridges, spread, none] = [h("div", {}), h("div", {}), h("div", {})];
  const node = h("div", { class: "distribution" }, ridges, spread, none, h("div", { class: "row" }, layer.node));
  const shapes = ridgelines(ridges, { title: "distribution of the gradient" });
  const lines = lineChart(spread, { title: "spread of the gradient", unit: "1", height: 262, onRound: (round) => params.set({ round }) });

  return {
    node,

    load(signal) {
      return ctx.api.get(of(run, "layers", "distribution"), { layer: params.get("layer"), node: params.get("node"), round: params.get("round") }, signal);
    },

    show(found) {
      ridges.hidden = !found.measured;
      spread.hidden = !found.spread;
      fill(none, !found.measured && !found.spread && empty("No distribution here.", found.note));
      layer.node.hidden = !found.layers.length;
      const known = found.layers.includes(found.layer) || !found.layer ? found.layers : [found.layer, ...found.layers];
      layer.show([["", known.map((name) => [name, name])]], found.layer);
      if (found.measured) {
        shapes.update({
          ridges: found.ridges.map((one) => ({ name: `round ${one.round}`, short: `r${one.round}`, xs: found.bins, heights: one.heights })),
          ticks: found.bins.map((x, i) => ({ x, text: found.labels[i] })),
          xLabel: "value",
          note: [`${found.layer}. ${found.note}`, zeros(found.ridges), found.ridges.length < found.rounds ? `${found.ridges.length} of ${found.rounds} rounds.` : ""].filter(Boolean).join(" "),
        });
      }
      if (found.spread) {
        const { rounds, mean, below, above, smallest, largest } = found.spread;
        lines.update({
          series: [
            { name: "mean ± std", rounds, values: mean, low: below, high: above },
            { name: "largest", rounds, values: largest, dash: true },
            { name: "smallest", rounds, values: smallest, dash: true },
          ],
          note: `${found.layer}. ${found.note}`,
        });
      }
    },

    destroy() {
      shapes.destroy();
      lines.destroy();
    },
  };
}

function zeros(ridges) {
  const last = ridges.at(-1);
  return last?.zeros > 0.001 ? `${percent(last.zeros)} are exactly 0 in round ${last.round}.` : "";
}
