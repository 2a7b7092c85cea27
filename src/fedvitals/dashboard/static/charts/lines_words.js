// SPDX-License-Identifier: Apache-2.0
// The texts of a line chart: under the pointer, announced, as a label and as a table.

import { theme } from "../colour.js";
import { NONE, exactly, number, withUnit } from "../format.js";
import { colourOf, lastOf, valueAt } from "./lines_values.js";
import { flagRows } from "./rounds.js";

const TOLD = 4; // lines named in the heading; the tooltip names all

const roundName = (state, axis, round) => (state.labels ? (state.labels[round] ?? "") : `${axis.label} ${number(round)}`);

export function readout(state, axis, options) {
  if (axis.hover === null) return "";
  const told = (name, one, values) => {
    const value = valueAt(one, values, axis.hover);
    return value === undefined ? "" : `${name} ${withUnit(value, options.unit)}`;
  };
  const bold = state.series.filter((one) => !one.faint);
  const lines = (bold.length ? bold : state.series).slice(0, TOLD).map((one) => told(one.name, one, one.values));
  const bands = state.bands.map((one) => told(`median of ${one.name}`, one, one.median));
  const said = [...lines, ...bands].filter(Boolean).join(" · ") || NONE;
  return state.labels ? `${state.labels[axis.hover] ?? ""}: ${said}` : said;
}

export function tip(state, axis, options) {
  const round = axis.hover;
  if (round === null) return null;
  const colours = theme();
  const rows = [];
  for (const one of state.series) {
    const value = valueAt(one, one.values, round);
    if (value === undefined && state.series.length > 6) continue;
    const [low, high] = one.low ? [valueAt(one, one.low, round), valueAt(one, one.high, round)] : [];
    const spread = low !== undefined && low !== high ? `  (${number(low)} to ${number(high)})` : "";
    rows.push({ colour: colourOf(one, colours), name: one.name, value: inFull(value, options) + spread });
  }
  for (const one of state.bands) {
    const [min, p5, median, p95, max] = ["min", "p5", "median", "p95", "max"].map((name) => valueAt(one, one[name], round));
    rows.push({ colour: one.colour ?? colours.ink2, name: `${one.name} median`, value: inFull(median, options) });
    if (p5 !== undefined && p5 !== null) rows.push({ name: "5 % to 95 %", value: `${number(p5)} to ${number(p95)}` });
    if (min !== undefined && min !== null) rows.push({ name: "smallest, largest", value: `${withUnit(min, options.unit)}, ${withUnit(max, options.unit)}` });
  }
  return { head: roundName(state, axis, round), rows: [...rows, ...flagRows(state.flags, round)] };
}

function inFull(value, options) {
  if (value === undefined || value === null) return "–";
  return options.digits ? number(value, options.digits) : withPlain(value, options.unit);
}

/** Every digit; with the readable form beside it if a unit changes the figure. */
function withPlain(value, unit) {
  return unit === "bytes" || unit === "seconds" || unit === "bytes/s" ? withUnit(value, unit) : exactly(Number(value.toPrecision(9)), unit);
}

export function spoken(state, axis, unit) {
  if (axis.hover === null) return `${axis.label}s ${axis.view[0]} to ${axis.view[1]}`;
  const one = state.series[state.chosen] ?? null;
  const [band] = state.bands;
  const value = one ? valueAt(one, one.values, axis.hover) : band && valueAt(band, band.median, axis.hover);
  const flags = flagRows(state.flags, axis.hover).map((row) => row.name);
  const said = [roundName(state, axis, axis.hover), one?.name, value === undefined ? "no value" : withUnit(value, unit)];
  return [...said, ...flags].filter(Boolean).join(", ");
}

export function summary(state, axis, options) {
  const first = state.series.find((one) => !one.faint) ?? state.bands[0];
  const last = first ? lastOf(first.rounds, first.values?.length ? first.values : (first.median ?? []), axis.view[1]) : null;
  const parts = [`${options.title ?? "Chart"}, ${axis.label}s ${axis.view[0]} to ${axis.view[1]}`];
  if (last) parts.push(`last value ${withUnit(last.value, options.unit)} of ${first.name} at ${roundName(state, axis, last.round)}`);
  parts.push(state.flags.length ? `${state.flags.length} findings marked` : "no finding marked");
  return parts.join("; ");
}

export function csv(state) {
  const rows = [["series", state.labels ? "label" : "round", "value", "low", "high"]];
  const at = (round) => (state.labels ? (state.labels[round] ?? round) : round);
  for (const one of state.series) {
    for (let i = 0; i < one.rounds.length; i += 1) rows.push([one.name, at(one.rounds[i]), one.values[i], one.low?.[i], one.high?.[i]]);
  }
  for (const one of state.bands) {
    for (const name of ["min", "p5", "median", "p95", "max"]) {
      for (let i = 0; i < one.rounds.length; i += 1) rows.push([`${one.name} ${name}`, at(one.rounds[i]), one[name][i], null, null]);
    }
  }
  return rows;
}
