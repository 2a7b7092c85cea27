// SPDX-License-Identifier: Apache-2.0
// Every chart with small, large, empty and hostile data. `?only=name` draws one section.

import { h } from "/static/dom.js";
import { Axis, bars, heatMap, lineChart, matrix, ridgelines, scatter, sparkline, stackChart, topologyPicture, waterfall } from "/static/charts/index.js";
import * as asked from "/asked.js";
import { band, cloud, dice, federation, flags, grid, HOSTILE, ill, lanes, likeness, losses, phases, shapes, upTo } from "/invented.js";

const only = new URLSearchParams(location.search).get("only");
const main = document.getElementById("main");
const charts = {};
window.gallery = { charts, clicked: [], asked };

const clicked = (...what) => window.gallery.clicked.push(what);

function section(name, build) {
  if (only && only !== name) return;
  const host = h("section", { class: "band", id: name }, h("h2", { text: name }));
  main.append(host);
  build(host);
}

section("overview", (host) => {
  const axis = new Axis({ from: 1, to: 40 });
  window.gallery.axis = axis;
  charts.accuracy = lineChart(host, { title: "Accuracy", unit: "share", axis, height: 150, onRound: (round) => clicked("round", round) });
  charts.accuracy.update({ bands: [band(40)], series: [ill(40)], flags });
  const roll = dice(9);
  const gsc = { name: "GSC", rounds: upTo(40), values: upTo(40).map((round) => (round % 13 === 0 ? 0 : 10 ** (2 + Math.sin(round / 5) + roll()))) };
  charts.gsc = lineChart(host, { title: "Gradient scale coefficient", unit: "1", axis, height: 130, scale: "log0" });
  charts.gsc.update({ series: [gsc], flags, threshold: { value: 3000, label: "explodes" } });
  charts.clients = heatMap(host, { title: "Loss of clients", unit: "nats", axis, maxHeight: 240, onCell: (row, column) => clicked("cell", row, column), rowHref: (row) => `/runs/x/clients/${encodeURIComponent(row)}`, selected: (row) => row === "c7" });
  charts.clients.update({ grid: losses(20, 40), flags, marks: [{ row: "c7", from: 5, to: 40, severity: "critical", label: "label noise" }] });
  charts.phases = stackChart(host, { title: "Round time by phase", unit: "seconds", axis, height: 130, onRound: (round) => clicked("round", round) });
  charts.phases.update(phases(40));
});

section("lines", (host) => {
  const axis = new Axis();
  const rounds = upTo(30);
  const roll = dice(1);
  charts.odd = lineChart(host, { title: HOSTILE, unit: "nats", axis });
  charts.odd.update({
    series: [
      { name: HOSTILE, rounds, values: rounds.map((round) => (round === 7 ? NaN : round === 12 ? null : round === 18 ? Infinity : round === 21 ? -Infinity : 2 / round + 0.1 * roll())) },
      { name: "every fifth", rounds: [1, 6, 20, 26], values: [1, 0.8, 0.9, 0.7], dash: true },
      { name: "buckets", rounds: [1, 6, 11, 16, 21, 26], values: [1.5, 1.3, 1.2, 1.3, 1.1, 1], low: [1.2, 1.2, 1, 1.2, 0.4, 0.9], high: [1.7, 1.4, 1.9, 1.4, 1.2, 1.2] },
    ],
    flags: [{ round: 3, severity: "warning", label: HOSTILE, href: "javascript:alert(1)" }],
  });
  const many = upTo(20000);
  charts.spike = lineChart(host, { title: "Twenty thousand points, one spike up, one down", unit: "1", axis: new Axis() });
  charts.spike.update({ series: [{ name: "loss", rounds: many, values: many.map((at) => (at === 7001 ? 40 : at === 13001 ? -30 : Math.sin(at / 900) + roll())) }] });
  charts.empty = lineChart(host, { title: "Empty", unit: "share" });
  charts.empty.update({ series: [], bands: [] });
  charts.layers = lineChart(host, { title: "Gradient over depth", unit: "1", scale: "log" });
  const names = upTo(12, 0).map((at) => `features.${at}.conv.weight`);
  charts.layers.update({ xs: { labels: names }, series: upTo(8).map((at) => ({ name: `round ${at * 5}`, rounds: upTo(12, 0), values: upTo(12, 0).map((depth) => 10 ** (-depth / 4 - at / 9)) })) });
  host.append(sparkline([1, 2, null, 4, 3, NaN, 8, 2], { label: "a course" }), sparkline([]), sparkline([3]), sparkline(upTo(5000).map((at) => (at === 2500 ? 50 : roll())), { width: 120 }));
});

section("large", (host) => {
  const axis = new Axis();
  charts.large = heatMap(host, { title: "1 000 clients × 500 rounds", unit: "nats", axis, rowHeight: 12, maxHeight: 360, onCell: (row, column) => clicked("cell", row, column) });
  charts.large.update({ grid: losses(1000, 500) });
  charts.dense = heatMap(host, { title: "Six thousand rounds, one of them ill", unit: "1", axis: new Axis(), rowHeight: 16 });
  charts.dense.update({ grid: grid(["a", "b"], 6000, (row, column) => (row === 1 && column === 3001 ? 1 : 0.5)) });
  charts.long = stackChart(host, { title: "Phases of 5 000 rounds", unit: "seconds", axis: new Axis() });
  charts.long.update(phases(5000));
});

section("heat", (host) => {
  charts.signed = heatMap(host, { title: "Signed", unit: "1", colours: "signed", axis: new Axis(), rowHeight: 20 });
  charts.signed.update({ grid: grid(["minus", HOSTILE, "plus"], 21, (row, column) => (row - 1) * 2 + (column - 10) / 10) });
  charts.logged = heatMap(host, { title: "Gradient norm of layers", unit: "1", log: true, axis: new Axis(), rowHeight: 14 });
  charts.logged.update({ grid: grid(upTo(8, 0).map((at) => `features.${at}.conv.weight`), 60, (row, column) => (column === 30 && row === 2 ? 0 : 10 ** (-row - Math.sin(column / 9)))) });
  charts.blank = heatMap(host, { title: "Empty", axis: new Axis() });
  charts.blank.update({ grid: grid([], 0, () => 0) });
});

section("round", (host) => {
  charts.waterfall = waterfall(host, { title: "Round 12", maxHeight: 260, onPart: (lane, part) => clicked("part", lane.name, part.name) });
  charts.waterfall.update({ seconds: 4.2, lanes: lanes(24), note: "critical path outlined" });
  charts.crowd = waterfall(host, { title: "2 000 clients of 50 parts", maxHeight: 200 });
  charts.crowd.update({ seconds: 60, lanes: upTo(2000, 0).map((at) => ({ name: `client-${at}`, href: `/c/${at}`, parts: upTo(50, 0).map((part) => ({ name: ["download", "forward", "backward", "wait"][part % 4], start: part * 1.2 + (at % 7) / 10, seconds: 1, critical: false, detail: "" })) })) });
  charts.nothing = waterfall(host, { title: "Empty" });
  charts.nothing.update({ seconds: 0, lanes: [] });
  charts.bars = bars(host, { title: "Suspects", unit: "share", onBar: (bar) => clicked("bar", bar.name) });
  charts.bars.update({ bars: [{ name: "c7", value: 0.96, of: 1, severity: "critical", text: "96 % label noise", href: "/c/c7" }, { name: HOSTILE, value: 0.41, of: 1, severity: "warning", text: "41 %" }, { name: "c12", value: 0.04, of: 1, severity: "note" }, { name: "c3", value: null, of: 1 }, { name: "c4", value: NaN, of: 1 }] });
});

section("map", (host) => {
  charts.scatter = scatter(host, { title: "Updates of round 12", xLabel: "first direction", onPoint: (point) => clicked("point", point.name) });
  charts.scatter.update({ points: cloud(60), trail: upTo(9).map((at) => ({ x: -3 + at / 3, y: Math.sin(at) })) });
  charts.thousand = scatter(host, { title: "2 000 clients", height: 300 });
  charts.thousand.update({ points: cloud(2000) });
  charts.matrix = matrix(host, { title: "Likeness of updates", unit: "cosine", colours: "signed", onCell: (row, column) => clicked("pair", row, column) });
  charts.matrix.update(likeness(24));
  charts.bigMatrix = matrix(host, { title: "Likeness of 1 000 clients", colours: "signed" });
  charts.bigMatrix.update(likeness(1000));
});

section("layers", (host) => {
  charts.ridges = ridgelines(host, { title: "Gradients of layer 3" });
  charts.ridges.update({ ridges: shapes(12), xLabel: "log₁₀ |g|" });
  charts.flat = ridgelines(host, { title: "Empty" });
  charts.flat.update({ ridges: [] });
});

section("topology", (host) => {
  for (const [kind, count] of [["star", 20], ["clusters", 30], ["tree", 24], ["rings", 24], ["star", 1000]]) {
    const name = `${kind}${count}`;
    charts[name] = topologyPicture(host, { title: `${kind} of ${count}`, height: 340, onNode: (node) => clicked("node", node.name) });
    charts[name].update(federation(kind, count));
  }
});

window.gallery.ready = true;
