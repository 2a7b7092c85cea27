// SPDX-License-Identifier: Apache-2.0
// What the rounds cost besides time: memory by purpose, bytes transferred, the machine.

import { bars, lineChart } from "../charts/index.js";
import { fill, h } from "../dom.js";
import { bytes, number, percent, seconds, withUnit } from "../format.js";
import { runLink } from "../params.js";
import { rowTable } from "./rows.js";
import { empty } from "./states.js";

const GROWS = new Set(["memory.resident", "memory.cuda_allocated", "memory.cuda_reserved"]); // a growth of these is meaningful

function whose(run, node) {
  return node === null ? "the whole run" : h("a", { href: runLink(run, "clients", node), text: node });
}

export function memoryPanel(run, axis) {
  const [none, above, left, right] = [h("div", {}), h("div", {}), h("div", {}), h("div", {})];
  const peaks = rowTable([
    { name: "metric", text: "memory", cell: (row) => h("span", { text: row.title, title: `${row.metric}: ${row.meaning}` }) },
    { name: "bytes", text: "most", num: true, cell: (row) => bytes(row.bytes) },
    { name: "node", text: "whose", class: "name", cell: (row) => whose(run, row.node === "server" ? null : row.node) },
    { name: "round", text: "round", num: true, cell: (row) => row.round },
    { name: "growth", text: "grew by", num: true, title: "from the first round to the last, of the node that grew the most", cell: (row) => (GROWS.has(row.metric) && row.growth_bytes > 0 ? bytes(row.growth_bytes) : "–") },
  ], { key: (row) => row.metric, caption: "Memory" });
  const chart = lineChart(above, { title: "resident memory", unit: "bytes", axis, height: 140 });
  const shares = bars(left, { title: "what it is for", unit: "bytes" });
  const clients = bars(right, { title: "largest clients", unit: "bytes" });
  const split = h("div", { class: "split" }, h("div", {}, peaks.node, above), h("div", {}, left, right));
  return {
    node: h("div", {}, none, split),
    show(found) {
      split.hidden = !found;
      fill(none, !found && empty("No memory was measured."));
      if (!found) return;
      peaks.show(found.peaks);
      above.hidden = !found.trends.length;
      chart.update({ series: found.trends.map((one) => lineOf(one)), note: shown(found.trends[0]) });
      left.hidden = !found.shares.length;
      shares.update({ bars: found.shares.map((one) => ({ name: one.name, value: one.bytes, text: bytes(one.bytes) })), note: `of ${found.node}${found.batch ? `, batches of ${number(found.batch)}` : ""}, in its largest round` });
      right.hidden = !found.clients.length;
      clients.update({ bars: found.clients.slice(0, 8).map((one) => ({ name: one.name, value: one.bytes, text: bytes(one.bytes), href: runLink(run, "clients", one.name) })), note: found.of === "memory.tensors" ? "a step’s tensors" : "resident" });
    },
    destroy() {
      for (const one of [chart, shares, clients]) one.destroy();
    },
  };
}

export function trafficPanel(run, axis) {
  const [none, above, right, total] = [h("div", {}), h("div", {}), h("div", {}), h("p", {})];
  const chart = lineChart(above, { title: "bytes of all clients", unit: "bytes", axis, height: 150 });
  const clients = bars(right, { title: "who moved the most", unit: "bytes" });
  const kinds = rowTable([
    { name: "kind", text: "messages", cell: (row) => row.kind },
    { name: "bytes", text: "on the wire", num: true, cell: (row) => bytes(row.bytes) },
    { name: "share", text: "share", num: true, cell: (row) => percent(row.share) },
    { name: "raw", text: "compressed", num: true, cell: (row) => (row.bytes ? `${number(row.raw_bytes / row.bytes)}×` : "–") },
    { name: "messages", text: "how many", num: true, cell: (row) => number(row.messages) },
  ], { key: (row) => row.kind, caption: "Messages by kind" });
  const of = h("p", { class: "small muted" });
  const reached = rowTable([
    { name: "accuracy", text: "accuracy reached", cell: (row) => percent(row.accuracy) },
    { name: "round", text: "round", num: true, cell: (row) => (row.round === null ? h("span", { class: "muted", text: row.best === null ? "not reached" : `not reached, best ${percent(row.best)}` }) : h("a", { href: runLink(run, "rounds", row.round), text: row.round })) },
    { name: "seconds", text: "time", num: true, cell: (row) => seconds(row.virtual_seconds ?? row.seconds) },
    { name: "bytes", text: "bytes", num: true, cell: (row) => bytes(row.bytes) },
  ], { key: (row) => row.accuracy, caption: "What it took to reach an accuracy" });
  const split = h("div", { class: "split" }, h("div", {}, total, above, reached.node), h("div", {}, right, kinds.node, of));
  return {
    node: h("div", {}, none, split),
    show(found) {
      split.hidden = !found;
      fill(none, !found && empty("No transfers were recorded.", "Monitor.transfer() records them; the lab does so by itself."));
      if (!found) return;
      const told = [[found.sent, "sent by clients"], [found.received, "received by them"], [found.between, "sent by the server and by groups"]];
      const telemetry = found.telemetry ? `Telemetry, ${bytes(found.telemetry)}, is not in these.` : "No telemetry was sent.";
      const parts = told.filter(([size]) => size > 0).map(([size, words]) => `${bytes(size)} ${words}`);
      total.textContent = `${bytes(found.total)} in all${parts.length ? `: ${parts.join(", ")}` : ""}. ${telemetry}`;
      chart.update({ series: found.trends.map((trend, at) => lineOf(trend, TRAFFIC[at])), note: shown(found.trends[0]) });
      above.hidden = !found.trends.length;
      right.hidden = !found.clients.length;
      clients.update({ bars: found.clients.slice(0, 10).map((one) => ({ name: one.node, value: one.sent + one.received, text: bytes(one.sent + one.received), href: runLink(run, "clients", one.node) })), note: `${Math.min(10, found.total_clients)} of ${number(found.total_clients)} clients` });
      kinds.show(found.kinds);
      of.textContent = found.kinds.length ? `Messages of the newest ${found.kinds_rounds} rounds.` : "";
      reached.show(found.reached);
    },
    destroy() {
      chart.destroy();
      clients.destroy();
    },
  };
}

export function machinePanel() {
  const table = rowTable([
    { name: "metric", text: "machine", cell: (row) => h("span", { text: row.title, title: row.metric }) },
    { name: "mean", text: "mean", num: true, cell: (row) => withUnit(row.mean, row.unit) },
    { name: "extreme", text: "extreme", num: true, title: "the largest; of what is free, the smallest", cell: (row) => withUnit(row.extreme, row.unit) },
    { name: "round", text: "in round", num: true, cell: (row) => row.round },
  ], { key: (row) => row.metric, caption: "Machine" });
  const node = h("section", { class: "panel", hidden: true }, h("h2", { text: "machine" }), table.node);
  return {
    node,
    show(rows) {
      node.hidden = !rows.length;
      table.show(rows);
    },
  };
}

/** Up and down in the colours that they have in the overview. */
const TRAFFIC = [2, 5];

function lineOf(trend, index) {
  const joined = trend.total > trend.rounds.length;
  return { name: trend.name, index, rounds: trend.rounds, values: trend.values, ...(joined ? { low: trend.low, high: trend.high } : {}) };
}

function shown(trend) {
  const joined = trend ? Math.ceil(trend.total / Math.max(1, trend.rounds.length)) : 1;
  return joined > 1 ? `1 of ${joined} points shown, extremes kept` : "";
}
