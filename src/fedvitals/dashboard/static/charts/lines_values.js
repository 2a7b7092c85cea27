// SPDX-License-Identifier: Apache-2.0
// What is derived from the values of a line chart: a colour, the ends of the axis, the value at a round, the last one.

import { seriesColour } from "../colour.js";
import { extent, honestEnds, linear, log } from "./scales.js";
import { firstAt, indexAt } from "./tracks.js";

const FAR = 3; // number of spans by which a cohort's extremes may stretch the axis

export function colourOf(series, colours) {
  return series.colour ?? (series.faint ? colours.ink2 : seriesColour(series.index, colours));
}

/** The part of each list within the view. */
function within(one, name, low, high) {
  const values = one[name];
  if (!values?.length) return [];
  const [from, to] = [firstAt(one.rounds, low), firstAt(one.rounds, high + 1e-9)];
  return values.slice(from, one.rounds[to] === high ? to + 1 : to);
}

/** The ends of the value axis: all lines and the bulk of the cohort; its extremes unless they hide the rest. */
function domain(state, { low, high }, scale) {
  const pick = (one, ...names) => names.map((name) => within(one, name, low, high));
  const above = (values) => Array.from(values, (value) => (value > 0 ? value : null));
  const positive = (lists) => (scale === "linear" ? lists : lists.map(above));
  const lines = state.series.flatMap((one) => pick(one, "values", "low", "high"));
  const bulk = state.bands.flatMap((one) => pick(one, "p5", "median", "p95"));
  let [from, to] = extent(...positive([...lines, ...bulk, state.threshold ? [state.threshold.value] : []]));
  const [least, most] = extent(...positive(state.bands.flatMap((one) => pick(one, "min", "max"))));
  if (!(from <= to)) [from, to] = [least, most];
  if (!(from <= to)) return { from: scale === "linear" ? 0 : 0.1, to: 1, beyond: null };
  if (scale !== "linear") return { from: Math.min(from, least), to: Math.max(to, most), beyond: null };
  const span = (to - from || Math.abs(to) || 1) * FAR;
  const beyond = most > to + span ? most : least < from - span ? least : null;
  return { from: Math.max(Math.min(from, least), from - span), to: Math.min(Math.max(to, most), to + span), beyond };
}

export function scaleOf(state, box, options) {
  const kind = options.scale ?? "linear";
  const { from, to, beyond } = domain(state, box, kind);
  state.beyond = beyond;
  const count = Math.max(2, (box.y1 - box.y0) / 34);
  if (kind === "linear") {
    return linear(...honestEnds(from, to, options.unit), box.y1, box.y0, count, options.unit);
  }
  return log(from / 1.15, to * 1.15, box.y1, box.y0, { zero: kind === "log0", count });
}

/** The last existing value within the view. */
export function lastOf(rounds, values, high) {
  for (let at = Math.min(rounds.length - 1, firstAt(rounds, high)); at >= 0; at -= 1) {
    const value = values[at];
    if (rounds[at] <= high && typeof value === "number" && Number.isFinite(value)) return { round: rounds[at], value };
  }
  return null;
}

export function valueAt(one, values, round) {
  const at = indexAt(one.rounds, round, one.reach);
  return at < 0 ? undefined : values[at];
}
