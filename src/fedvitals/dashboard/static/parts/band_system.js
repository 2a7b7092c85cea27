// SPDX-License-Identifier: Apache-2.0
// System: where each round's time went, and how many bytes were transferred.

import { lineChart } from "../charts/lines.js";
import { stackChart } from "../charts/stack.js";
import { h } from "../dom.js";
import { go, runLink } from "../params.js";
import { ask, bandFrame, closer, COLUMNS, shownOf } from "./band.js";

export function systemBand(ctx, axis) {
  const [above, below] = [h("div", {}), h("div", {})];
  const frame = bandFrame("system", "time and bytes", null, above, below);
  const onRound = (round) => go(runLink(ctx.run, "rounds", round));
  const time = stackChart(above, { title: "round time by phase", unit: "seconds", axis, height: 128, onRound });
  const bytes = lineChart(below, { title: "bytes of all clients", unit: "bytes", axis, height: 92, onRound });

  return {
    node: frame.node,

    follow(now, signal) {
      frame.fill(() => ask(ctx, "phases", { points: COLUMNS, ...closer(axis, COLUMNS) }, signal), (found) => {
        const joined = Math.max(...found.rounds.map((_, i) => found.last[i] - found.first[i] + 1), 1);
        time.update({
          rounds: found.rounds,
          parts: found.parts,
          flags: now.flags,
          note: [
            found.clock === "virtual" ? "on the lab’s virtual clock" : "",
            found.parts.length ? "of the critical path" : "",
            joined > 1 ? `the slowest of every ${joined} rounds` : "",
          ].filter(Boolean).join("; "),
        });
        const lines = [["sent", "to the server", 2], ["received", "to the clients", 5]].filter(([name]) => found[name].some((one) => one !== null));
        below.hidden = !lines.length;
        bytes.update({
          series: lines.map(([name, text, index]) => ({ name: text, index, rounds: found.rounds, values: found[name] })),
          flags: now.flags,
          note: shownOf(found.rounds.length, found.total),
        });
      });
    },

    destroy() {
      time.destroy();
      bytes.destroy();
    },
  };
}
