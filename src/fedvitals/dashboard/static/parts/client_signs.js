// SPDX-License-Identifier: Apache-2.0
// A client's vital signs, each as its line over the band of its cohort, all on one axis: those behind its finding
// first, then the most deviating. The order stays as it was when the page opened: new rounds must not move what the
// user is looking at.

import { signWords } from "./sign_words.js";
import { lineChart } from "../charts/index.js";
import { fill, h } from "../dom.js";
import { number } from "../format.js";
import { go, runLink } from "../params.js";
import { ask, lineOf, POINTS } from "./band.js";

const FAR = 3.5; // σ from the other clients' median
const AT_ONCE = 3; // bands requested at the same time
const HEIGHT = 128;
const FIRST = 8; // signs shown unless the user asks for all

export function clientSigns(ctx, axis, node) {
  const grid = h("div", { class: "sign-grid" });
  const none = h("div", {});
  const more = h("button", { class: "link-button", on: { click: () => ctx.params.set({ signs: ctx.params.get("signs") === "all" ? null : "all" }) } });
  const cells = new Map(); // sign → {host, chart, sign, band}
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const cell = cells.get(entry.target.dataset.sign);
      if (cell) cell.inSight = entry.isIntersecting;
    }
    fetchBands();
  }, { rootMargin: "400px" });
  const order = []; // of names, as they first arrived
  let flags = [];
  let busy = 0;

  function cellOf(sign) {
    const { name, title, unit } = sign.series;
    if (!cells.has(name)) {
      const host = h("div", { data: { sign: name }, title: name });
      grid.append(host);
      const chart = lineChart(host, { title: signWords({ title }, name), unit, axis, height: HEIGHT, onRound: (round) => go(runLink(ctx.run, "rounds", String(round))) });
      cells.set(name, { host, chart, sign, band: null, asked: null, inSight: false });
      seen.observe(host);
    }
    return cells.get(name);
  }

  function draw(cell) {
    const { sign, band } = cell;
    cell.chart.update({
      series: [lineOf(sign.series, { name: node, index: 1 })],
      bands: band && band.rounds.length ? [{ ...band, name: "all clients" }] : [],
      flags,
      note: words(sign),
    });
    cell.host.classList.toggle("far", sign.evidence || sign.odd || Math.abs(sign.z ?? 0) >= FAR);
  }

  /** Bands of the visible signs, a few at a time: with a thousand clients each is half a million numbers. */
  async function fetchBands() {
    const next = [...cells.values()].find((cell) => cell.inSight && cell.asked !== cell.wanted);
    if (!next || busy >= AT_ONCE || ctx.signal.aborted) return;
    busy += 1;
    next.asked = next.wanted;
    try {
      next.band = await ask(ctx, "band", { sign: next.sign.series.name, points: POINTS }, ctx.signal);
      draw(next);
    } catch (error) {
      if (error.name !== "AbortError" && error.status === undefined) console.error(error);
    } finally {
      busy -= 1;
      fetchBands();
    }
    fetchBands();
  }

  return {
    nodes: [
      h("p", { class: "small muted", text: "Its line over the band of all clients (5 % to 95 %, median, extremes). σ: standard deviations from the other clients’ median, 1.4826 times the median distance from the median; never less than 5 % of the median." }),
      none, grid, h("p", {}, more),
    ],
    show(signs, marks, version) {
      flags = marks;
      fill(none, !signs.length && h("p", { class: "empty", text: "This client reported no vital sign." }));
      const all = ctx.params.get("signs") === "all";
      const told = new Map(signs.map((sign) => [sign.series.name, sign]));
      for (const name of told.keys()) if (!order.includes(name)) order.push(name);
      order.forEach((name, i) => {
        const known = cells.get(name);
        if (known) known.host.hidden = i >= FIRST && !all;
        if (!told.has(name) || (i >= FIRST && !all)) return;
        const cell = cellOf(told.get(name));
        Object.assign(cell, { sign: told.get(name), wanted: version });
        draw(cell);
      });
      more.hidden = order.length <= FIRST;
      more.textContent = all ? `only the first ${FIRST}` : `${order.length - FIRST} more signs, in which it deviates less`;
      fetchBands();
    },
    destroy() {
      seen.disconnect();
      for (const cell of cells.values()) cell.chart.destroy();
    },
  };
}

function words(sign) {
  return [sign.evidence && "evidence of its finding", deviationOf(sign)].filter(Boolean).join("; ");
}

function deviationOf(sign) {
  if (sign.odd) return `not finite in round ${sign.round}`;
  if (sign.z === null) return "too few other clients to compare";
  const size = Math.abs(sign.z);
  if (size < 0.05) return `as the median client, r${sign.round}`;
  return `${number(Math.round(size * 10) / 10, 2)} σ ${sign.z > 0 ? "above" : "below"} the median, r${sign.round}`;
}
