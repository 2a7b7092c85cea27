// SPDX-License-Identifier: Apache-2.0
// Learning: accuracy and loss of the federation, the clients' loss as a band, and suspects as lines on top of it.

import { lineChart } from "../charts/lines.js";
import { h } from "../dom.js";
import { number } from "../format.js";
import { go, runLink } from "../params.js";
import { ask, bandFrame, clientLines, closer, globalLine, lineOf, POINTS, remade, shownOf } from "./band.js";

export function learningBand(ctx, axis) {
  const [above, below] = [h("div", {}), h("div", {})];
  const frame = bandFrame("learning", "how well, and how alike", null, above, below);
  const onRound = (round) => go(runLink(ctx.run, "rounds", round));
  const accuracy = lineChart(above, { title: "accuracy", unit: "share", axis, height: 128, onRound });
  const loss = remade(below, (host, how) => lineChart(host, { ...how, axis, height: 152, onRound }));
  let outcome = { accuracy: null, loss: null };
  let shared = null;
  let cohort = null;
  let own = [];

  function draw() {
    const flags = shared.flags;
    const one = outcome.accuracy;
    above.hidden = !one.total;
    accuracy.update({ series: one.total ? [lineOf(one)] : [], flags, note: shownOf(one.rounds.length, one.total) });
    const global = globalLine(outcome.loss);
    const name = shared.learning ?? "loss";
    const known = shared.signs.find((sign) => sign.name === name);
    const unit = known?.unit ?? outcome.loss.unit;
    const rest = clientLines(ctx.run, own, shared.lines);
    below.hidden = !global.length && !shared.learning;
    loss.with({ title: known?.title ?? outcome.loss.title, unit }).update({
      series: [...(unit === outcome.loss.unit ? global : []), ...rest],
      bands: cohort?.rounds.length ? [{ ...cohort, name: "clients" }] : [],
      flags,
      note: noteOf(cohort, shared),
    });
  }

  return {
    node: frame.node,

    /** The first content that is shown: one small answer. */
    load: (signal) => ask(ctx, "series", { names: ["accuracy", "loss"], points: POINTS, ...closer(axis, POINTS) }, signal),

    show([first, second], now) {
      outcome = { accuracy: first, loss: second };
      shared = now;
      if (cohort && cohort.name !== now.learning) [cohort, own] = [null, []];
      draw();
    },

    follow(now, signal) {
      if (!now.learning) return;
      const part = { points: POINTS, ...closer(axis, POINTS) };
      frame.fill(() => Promise.all([
        ask(ctx, "band", { sign: now.learning, ...part }, signal),
        now.lines.length ? ask(ctx, "series", { names: [now.learning], nodes: now.lines, ...part }, signal) : [],
      ]), (found) => {
        [cohort, own] = found;
        draw();
      });
    },

    destroy() {
      accuracy.destroy();
      loss.destroy();
    },
  };
}

/** How many clients are behind the band, if not all; and how much was joined. */
function noteOf(cohort, shared) {
  if (!cohort?.rounds.length) return "";
  const most = Math.max(...cohort.clients);
  const few = most < shared.clients ? `measured on up to ${number(most)} of ${number(shared.clients)} clients` : "";
  return [few, shownOf(cohort.rounds.length, cohort.total)].filter(Boolean).join("; ");
}
