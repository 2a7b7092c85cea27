// SPDX-License-Identifier: Apache-2.0
// Invented data for the gallery: the same each time, so that a test can know a pixel.

export const HOSTILE = '<img src=x onerror="window.hurt = 1">\u0000\ud800 & "c7"';

/** Numbers that look random and are not (mulberry32). */
export function dice(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

export const upTo = (count, first = 1) => Array.from({ length: count }, (_, at) => first + at);

/** A cohort: the accuracy of 20 clients in quantiles. */
export function band(count) {
  const roll = dice(3);
  const rounds = upTo(count);
  const median = rounds.map((round) => 0.92 - 0.7 * Math.exp(-round / (count / 5)) + 0.02 * roll());
  const away = (share) => median.map((value) => value - share * (0.6 + 0.4 * roll()));
  return { name: "20 clients", rounds, min: away(0.2), p5: away(0.09), median, p95: away(-0.05), max: away(-0.08) };
}

export function ill(count) {
  const roll = dice(7);
  const rounds = upTo(count);
  return { name: "c7", rounds, values: rounds.map((round) => (round < 5 ? 0.3 + round * 0.05 : 0.5 + 0.05 * roll())), href: "/runs/x/clients/c7" };
}

export const flags = [
  { round: 5, until: 40, severity: "critical", label: "c7 label noise", href: "/runs/x/findings/a" },
  { round: 9, until: 14, severity: "warning", label: "gradient dies in layer 1", href: "/runs/x/findings/b" },
  { round: 22, severity: "note", label: "c12 is late", href: "/runs/x/findings/c" },
];

/** A decoded Grid; `of(row, column)` gives a number, or ["state", n]. */
export function grid(rows, columns, of, { step = 1, unit = "nats" } = {}) {
  const values = new Float32Array(rows.length * columns);
  const state = new Uint8Array(rows.length * columns);
  const finite = [];
  for (let row = 0; row < rows.length; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      const at = row * columns + column;
      const cell = of(row, column);
      if (Array.isArray(cell)) [values[at], state[at]] = [NaN, cell[1]];
      else finite.push((values[at] = cell));
    }
  }
  finite.sort((a, b) => a - b);
  const quantile = (share) => finite[Math.round(share * (finite.length - 1))] ?? null;
  const firsts = Array.from({ length: columns }, (_, at) => 1 + at * step);
  return {
    rows, columns: firsts, last: firsts.map((first) => first + step - 1), values, state, unit, title: "",
    low: quantile(0.02), high: quantile(0.98), smallest: quantile(0), largest: quantile(1), total_rows: rows.length, total_columns: columns,
  };
}

export function losses(count, rounds) {
  const roll = dice(11);
  const rows = upTo(count, 0).map((at) => (at === 0 ? "c7" : `c${at < 8 ? at - 1 : at}`));
  return grid(rows, rounds, (row, column) => {
    if (roll() < 0.12) return ["state", 1];
    if (row === 2 && column === 8) return ["state", 2];
    if (row === 3 && column === 11) return ["state", 3];
    if (row === 4 && column === 13) return ["state", 4];
    if (row === 4 && column === 15) return ["state", 5];
    return (row === 0 && column > 4 ? 1.9 : 2.3 * Math.exp(-column / 14) + 0.1) + 0.15 * roll() + 0.01 * (row % 7);
  });
}

export function phases(count) {
  const roll = dice(5);
  const rounds = upTo(count);
  const part = (name, base, spread) => ({ name, values: rounds.map(() => base + spread * roll()) });
  return { rounds, parts: [part("download", 0.2, 0.1), part("compute", 0.9, 0.5), part("upload", 0.3, 0.2), part("wait", 0.1, 0.9), part("aggregate", 0.08, 0.02)], flags };
}

export function lanes(count) {
  const roll = dice(13);
  const server = { name: "server", parts: [{ name: "wait", start: 0, seconds: 3.4, critical: false, detail: "" }, { name: "aggregate", start: 3.4, seconds: 0.6, critical: true, detail: "20 updates" }, { name: "evaluate", start: 4, seconds: 0.2, critical: true, detail: "" }] };
  const clients = upTo(count, 0).map((at) => {
    const parts = [];
    let start = 0;
    for (const [name, length] of [["queue", 0.1 * roll()], ["download", 0.2 + 0.1 * roll()], ["compute", at === 3 ? 2.5 : 0.6 + roll()], ["upload", 0.2 + 0.2 * roll()]]) {
      parts.push({ name, start, seconds: length, critical: at === 3, detail: name === "upload" ? "1.2 MB" : "" });
      start += length;
    }
    return { name: at === 5 ? HOSTILE : `c${at}`, href: `/runs/x/clients/c${at}`, parts: [...parts, { name: "wait", start, seconds: Math.max(0, 3.4 - start), critical: false, detail: "" }] };
  });
  return [server, ...clients];
}

export function cloud(count) {
  const roll = dice(17);
  const near = () => roll() + roll() + roll() - 1.5;
  return upTo(count, 0).map((at) => {
    const group = at % 3;
    const severity = at === 7 ? "critical" : at === 12 ? "warning" : null;
    return { name: at === 12 ? HOSTILE : `c${at}`, x: [0, 3, -3][group] + near() + (at === 7 ? 6 : 0), y: [2, -1, -1][group] + near(), group: `group ${group}`, severity };
  });
}

export function likeness(count) {
  const rows = upTo(count, 0).map((at) => `c${at}`);
  const groups = rows.map((_, at) => Math.floor((at * 3) / count));
  const roll = dice(19);
  const values = new Float32Array(count * count);
  for (let row = 0; row < count; row += 1) {
    for (let column = 0; column < count; column += 1) {
      values[row * count + column] = row === column ? 1 : (groups[row] === groups[column] ? 0.6 : -0.2) + 0.3 * (roll() - 0.5);
    }
  }
  return { rows, columns: rows, values, groups, low: -1, high: 1 };
}

export function shapes(count) {
  return upTo(count).map((at) => {
    const xs = upTo(60, 0).map((x) => -6 + x / 10);
    return { name: `round ${at * 5}`, xs, heights: xs.map((x) => Math.exp(-((x + 1 + at / 5) ** 2)) + 0.3 * Math.exp(-((x + 4) ** 2) * 3)) };
  });
}

export function federation(kind, count) {
  const roll = dice(23);
  const nodes = [{ name: "server", role: "server", health: "ok", bytes: 4e7 }];
  const edges = [];
  const groups = Math.min(4, Math.ceil(count / 6));
  const hub = (group) => (kind === "tree" || kind === "clusters" ? `edge ${group}` : "server");
  if (hub(0) !== "server") {
    for (let group = 0; group < groups; group += 1) {
      nodes.push({ name: hub(group), role: "edge", group: `g${group}`, health: group === 1 ? "warning" : "ok", bytes: 1e7 });
      edges.push({ from: "server", to: hub(group), bytes: 8e6, share: 0.2 });
    }
  }
  for (let at = 0; at < count; at += 1) {
    const group = at % groups;
    nodes.push({ name: at === 9 ? HOSTILE : `c${at}`, role: "client", group: `g${group}`, health: at === 7 ? "critical" : at === 9 ? "warning" : at % 11 === 0 ? null : "ok", bytes: 2e6 });
    const named = (index) => (index === 9 ? HOSTILE : `c${index}`);
    if (kind === "rings") edges.push({ from: named(at), to: named(at + groups < count ? at + groups : group), bytes: 1e6 + 1e6 * roll(), share: 0.05 });
    else edges.push({ from: hub(group), to: nodes.at(-1).name, bytes: 1e6 + 3e6 * roll(), share: 0.05 });
  }
  return { kind, nodes, edges };
}
