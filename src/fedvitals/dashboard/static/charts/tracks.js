// SPDX-License-Identifier: Apache-2.0
// A series of values as pieces of a line. Missing values split it; where points are denser than pixels, each pixel
// keeps its first, smallest, largest and last value, so that no spike is lost.

const DENSE = 2; // points per pixel from which it is summarised

/** The smallest distance between neighbours: what «the next round» means in this series. */
export function stride(rounds) {
  let least = Infinity;
  for (let at = 1; at < rounds.length; at += 1) least = Math.min(least, rounds[at] - rounds[at - 1]);
  return Number.isFinite(least) && least > 0 ? least : 1;
}

/** The first index whose round is at least this one. */
export function firstAt(rounds, round) {
  let [low, high] = [0, rounds.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rounds[middle] < round) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The index of the value for a round: that round's own, or that of its bucket; −1 for none. */
export function indexAt(rounds, round, reach = 1) {
  const at = firstAt(rounds, round);
  if (rounds[at] === round) return at;
  return at > 0 && round - rounds[at - 1] < reach ? at - 1 : -1;
}

function oddOf(value) {
  if (typeof value !== "number") return null;
  if (Number.isNaN(value)) return "nan";
  return value === Infinity ? "up" : value === -Infinity ? "down" : null;
}

/** The runs of indices [from, to] without a gap, within the view and one point beyond; non-finite ones separately. */
function unbroken(rounds, values, y, low, high) {
  const [pieces, odd] = [[], []];
  const gap = stride(rounds) * 1.5;
  const first = Math.max(0, firstAt(rounds, low) - 1);
  let from = -1;
  for (let at = first; at < rounds.length; at += 1) {
    const value = values[at];
    const there = typeof value === "number" && Number.isFinite(value) && Number.isFinite(y(value));
    if (!there && oddOf(value) && rounds[at] >= low && rounds[at] <= high) odd.push({ at, kind: oddOf(value) });
    const broken = !there || (from >= 0 && rounds[at] - rounds[at - 1] > gap);
    if (broken && from >= 0) {
      pieces.push([from, at - 1]);
      from = -1;
    }
    if (there && from < 0) from = at;
    if (rounds[at] > high) {
      if (from >= 0) pieces.push([from, at]);
      return { pieces, odd };
    }
  }
  if (from >= 0) pieces.push([from, rounds.length - 1]);
  return { pieces, odd };
}

function dense(rounds, values, from, to, x, y) {
  const points = [];
  let at = from;
  while (at <= to) {
    const pixel = Math.floor(x(rounds[at]));
    let [last, low, high] = [at, at, at];
    while (last < to && Math.floor(x(rounds[last + 1])) === pixel) {
      last += 1;
      if (values[last] < values[low]) low = last;
      if (values[last] > values[high]) high = last;
    }
    for (const one of [...new Set([at, low, high, last])].sort((a, b) => a - b)) {
      points.push(x(rounds[one]), y(values[one]));
    }
    at = last + 1;
  }
  return points;
}

/** {lines: flat points of each piece, dots: single points, odd: [{at, kind}], shown, of}. */
export function track(rounds, values, { x, y, low, high, step }) {
  const { pieces, odd } = unbroken(rounds, values, y, low, high);
  const [lines, dots] = [[], []];
  let [shown, of] = [0, 0];
  for (const [from, to] of pieces) {
    const count = to - from + 1;
    const perPixel = count / Math.max(1, (rounds[to] - rounds[from]) * step);
    let points;
    if (perPixel > DENSE) {
      points = dense(rounds, values, from, to, x, y);
    } else {
      points = [];
      for (let at = from; at <= to; at += 1) points.push(x(rounds[at]), y(values[at]));
    }
    of += count;
    shown += points.length / 2;
    if (count === 1) dots.push([points[0], points[1]]);
    else lines.push(points);
  }
  return { lines, dots, odd, shown, of };
}

/** The area between two series, in pieces; missing on either side is missing. */
export function between(rounds, lower, upper, { x, y, low, high, step }) {
  const both = new Float64Array(rounds.length);
  for (let at = 0; at < rounds.length; at += 1) {
    const there = Number.isFinite(lower[at] ?? NaN) && Number.isFinite(upper[at] ?? NaN);
    both[at] = there && Number.isFinite(y(lower[at])) && Number.isFinite(y(upper[at])) ? 1 : Infinity;
  }
  const { pieces } = unbroken(rounds, both, () => 0, low, high);
  return pieces.map(([from, to]) => {
    const [over, under] = [[], []];
    let at = from;
    while (at <= to) {
      const pixel = Math.floor(x(rounds[at]));
      let [least, most, last] = [lower[at], upper[at], at];
      while (last < to && Math.floor(x(rounds[last + 1])) === pixel) {
        last += 1;
        least = Math.min(least, lower[last]);
        most = Math.max(most, upper[last]);
      }
      over.push(x(rounds[at]), y(most));
      under.push([x(rounds[at]), y(least)]);
      at = last + 1;
    }
    if (over.length === 2) {
      // A single round is still visible: as wide as its column, at most eight pixels.
      const half = Math.min(4, Math.max(1, step / 2));
      const [px, top, bottom] = [over[0], over[1], under[0][1]];
      return [px - half, top, px + half, top, px + half, bottom, px - half, bottom];
    }
    for (const [px, py] of under.reverse()) over.push(px, py);
    return over;
  });
}
