// SPDX-License-Identifier: Apache-2.0
// Maps values to pixels, and chooses the values at which an axis is labelled.

import { COUNTS } from "../format.js";

const ZERO_ROOM = 18; // pixels below a log axis where zero has its own level

/** The round number (1, 2, 5 × 10ⁿ) nearest to a step; `atLeast` never returns a smaller one. */
export function niceStep(rough, atLeast = false) {
  const power = 10 ** Math.floor(Math.log10(rough) + 1e-9);
  const share = rough / power;
  const [one, two, five] = atLeast ? [1.0001, 2.0001, 5.0001] : [1.5, 3.2, 7];
  return (share < one ? 1 : share < two ? 2 : share < five ? 5 : 10) * power;
}

export function niceTicks(low, high, count) {
  if (!(high > low)) return [low];
  const step = niceStep((high - low) / Math.max(1, count));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) {
    found.push(Number((at * step).toPrecision(12)));
  }
  return found;
}

const LEAST = { share: 0.1, points: 10 }; // smallest length of an axis in a unit
const LEAST_PART = 0.1; // the same for any other unit, relative to the largest value
const LEAST_PARTS = { seconds: 0.25, s: 0.25, bytes: 0.25, B: 0.25 }; // amounts, whose heights are read as ratios
const TO_ZERO = 0.5; // of the largest value: if the smallest is below it, the axis begins at 0

/**
 * The ends of a linear axis around values from `low` to `high`: wide enough that a small change stays a small slope,
 * and never beyond what the unit allows (a share never reaches 110 %, values that are never negative have their floor
 * at 0). If one value is at least twice another, the axis begins at 0, so that heights are in proportion.
 */
export function honestEnds(low, high, unit) {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return [low, high];
  const part = LEAST[unit] ?? (LEAST_PARTS[unit] ?? LEAST_PART) * Math.max(Math.abs(low), Math.abs(high));
  const least = COUNTS.has(unit) ? Math.max(1, part) : part;
  const missing = Math.max(0, least - (high - low)) / 2;
  const room = (high - low) * 0.06;
  let [from, to] = [low - Math.max(missing, room), high + Math.max(missing, room)];
  if (low >= 0 && low < TO_ZERO * high) from = 0;
  else if (low >= 0 && from < 0) [from, to] = [0, missing ? Math.max(to, least) : to];
  if (unit === "share" && high <= 1 && to > 1) [from, to] = [missing ? Math.min(from, 1 - least) : from, 1];
  return to > from ? [from, to] : [from, from + 1]; // if all values are zero, they lie on the floor
}

/** A scale: {of(value) → pixel, ticks, clamp}. Pixels run from `bottom` up to `top`. */
export function linear(low, high, bottom, top, count = 4, unit = "") {
  [low, high] = widened(low, high);
  const of = (value) => bottom + ((value - low) / (high - low)) * (top - bottom);
  const ticks = niceTicks(low, high, count).filter((tick) => !COUNTS.has(unit) || Number.isInteger(tick));
  return { kind: "linear", low, high, of, bottom, top, ticks };
}

function widened(low, high) {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  if (high > low) return [low, high];
  if (low === 0) return [0, 1]; // all values are zero: they lie on the floor
  const room = Math.abs(low) * 0.1 || 0.5;
  return [low - room, high + room];
}

/** Decades; values at or below zero have no position, unless `zero` gives them their own level. */
export function log(low, high, bottom, top, { zero = false, count = 4 } = {}) {
  if (!(low > 0) || !(high > 0)) [low, high] = high > 0 ? [high / 1000, high] : [0.1, 1];
  if (high / low < 1.02) [low, high] = [low / 2, high * 2];
  const floor = zero ? bottom - ZERO_ROOM : bottom;
  const [from, to] = [Math.log10(low), Math.log10(high)];
  const of = (value) => {
    if (value > 0) return floor + ((Math.log10(value) - from) / (to - from)) * (top - floor);
    return zero && value === 0 ? bottom - 4 : NaN;
  };
  const ticks = logTicks(low, high, count);
  return { kind: zero ? "log0" : "log", low, high, of, bottom, top, floor, ticks, zero: zero ? bottom - 4 : null };
}

function logTicks(low, high, count) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const decades = last - first + 1;
  // With fewer than three visible decades, 2 and 5 are labelled as well, or the axis would have a single number.
  const between = decades < 3 ? (count > 3 || decades < 2 ? [1, 2, 5] : [1, 3]) : [1];
  const every = Math.max(1, Math.ceil(decades / Math.max(2, count)));
  const found = [];
  for (let power = first - 1; power <= last; power += 1) {
    if (between.length === 1 && (power - first) % every) continue;
    for (const factor of between) {
      const tick = Number((factor * 10 ** power).toPrecision(3));
      if (tick >= low * 0.999 && tick <= high * 1.001) found.push(tick);
    }
  }
  return found.length > 1 ? found : niceTicks(low, high, count).filter((tick) => tick > 0);
}

/** Rounds at which an axis is labelled: integers, at least `room` pixels apart. */
export function roundTicks([low, high], step, room = 56) {
  const every = Math.max(1, Math.round(niceStep(Math.max(1, room / step), true)));
  const found = [];
  for (let at = Math.ceil(low / every) * every; at <= high; at += every) found.push(at);
  return found;
}

/** The smallest and largest finite numbers of many lists. */
export function extent(...lists) {
  let [low, high] = [Infinity, -Infinity];
  for (const list of lists) {
    if (!list) continue;
    for (let at = 0; at < list.length; at += 1) {
      const value = list[at];
      if (typeof value !== "number" || !Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return [low, high];
}
