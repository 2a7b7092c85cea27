// SPDX-License-Identifier: Apache-2.0
// What changed? Two to six runs on one axis: in words, in pictures, in figures, in settings.

import { of } from "../api.js";
import { Axis, bindAxis } from "../charts/axis.js";
import { lineChart } from "../charts/lines.js";
import { onTheme, seriesColour } from "../colour.js";
import { fill, h, keyed } from "../dom.js";
import { runLink } from "../params.js";
import { valuesOf } from "../parts/band.js";
import { chosenRuns, joined, MOST } from "../parts/chosen.js";
import { figureTable, settingTable, troubleTable } from "../parts/compare_tables.js";
import { runPicker } from "../parts/run_picker.js";
import { addressOf } from "../root.js";

export const title = "Compare";
const HEIGHT = { gsc: 240 };

export function view(root, ctx) {
  const { params } = ctx;
  let shown = null;
  const axis = new Axis();
  let unbind = null;
  const picker = runPicker(ctx, (id) => choose([...chosenRuns(params), id]));
  const chips = h("ul", { class: "sides" });
  const repeats = h("input", { type: "checkbox", on: { change: () => params.set({ repeats: repeats.checked ? 1 : null }, { push: true }) } });
  const options = h("label", { class: "field-label" }, repeats, "all repeats of each (same name and settings, other seeds)");
  const words = h("div", { class: "verdict-words" });
  const pictures = h("div", { class: "split" });
  const [figures, troubles, settings] = [h("div", {}), h("div", {}), h("div", {})];
  const panel = (name, about, body) => h("section", { class: "panel", "aria-label": about }, h("h2", { text: name }), body);
  const found = h("div", { class: "stack" }, words, pictures, panel("figures", "Figures", figures), panel("findings", "Findings", troubles), panel("why: settings", "Settings", settings));
  const invite = h("p", { class: "empty", text: "Choose two to six runs: their trends come onto one axis, with what changed, where they diverge, and which settings differ." });
  root.append(h("div", { class: "stack" }, h("div", { class: "head" }, h("h1", { text: "Compare" }), options), chips, picker.node, invite, found));
  const charts = new Map();
  const unlisten = onTheme(() => shown && draw(shown));

  function choose(runs) {
    const kept = [...new Set(runs)].slice(0, MOST);
    const base = params.get("baseline");
    params.set({ runs: joined(kept), baseline: kept.includes(base) ? base : null }, { push: true });
  }

  return {
    async load(signal) {
      const runs = chosenRuns(params);
      ctx.runs = runs;
      if (runs.length < 2) return { runs, names: await namesOf(ctx, runs, signal), data: null };
      const query = new URLSearchParams(runs.map((run) => ["runs", run]));
      if (params.get("baseline")) query.set("baseline", params.get("baseline"));
      if (params.get("repeats")) query.set("repeats", "true");
      const data = await ctx.api.get(addressOf(`/api/compare?${query}`), {}, signal);
      return { runs, data, names: {} };
    },

    show({ runs, names, data }) {
      repeats.checked = params.get("repeats") !== null;
      invite.hidden = data !== null;
      found.hidden = data === null;
      options.hidden = data === null;
      const sides = data ? arranged(data, runs) : runs.map((run, i) => ({ name: names[run] ?? run, runs: [run], letter: "", colour: i, asked: [run] }));
      keyed(chips, sides, (side) => side.runs[0], () => h("li", { class: "side" }), (node, side) => chip(node, side, data, runs));
      picker.show(runs, runs.length >= MOST);
      shown = data;
      if (data) draw(data);
    },

    destroy() {
      unbind?.();
      unlisten();
      picker.destroy();
      for (const chart of charts.values()) chart.destroy();
    },
  };

  function chip(node, side, data, runs) {
    const now = JSON.stringify([side, data === null, runs.length]);
    if (node.dataset.now === now) return;
    node.dataset.now = now;
    const base = data !== null && side.letter === "A";
    const others = runs.filter((run) => !side.asked.includes(run));
    fill(node, swatch(side.colour), side.letter && h("strong", { text: side.letter }), h("a", { class: "name", href: runLink(side.runs[0]), title: side.runs.join(", "), text: side.name }),
      side.runs.length > 1 && h("span", { class: "muted small", text: `${side.runs.length} runs` }),
      data && (base ? h("span", { class: "chip", text: "baseline" })
        : h("button", { class: "link-button small", type: "button", text: "make baseline", "aria-label": `Make ${side.name} the baseline`, on: { click: () => params.set({ baseline: side.runs[0] }, { push: true }) } })),
      h("button", { class: "icon-button", type: "button", text: "×", title: "Take out", "aria-label": `Take ${side.name} out of the comparison`, on: { click: () => choose(others) } }));
  }

  function draw(data) {
    const sides = arranged(data, chosenRuns(params));
    const marks = sides.map((side) => () => [swatch(side.colour), side.letter]);
    fill(words, data.words.map((text) => h("p", { class: "said", text })),
      data.sides.map((side, i) => h("p", { class: "side-verdict" }, marks[i](), " ", h("a", { href: runLink(side.runs[0], "findings"), text: side.verdict }))),
      [...data.partings.map((one) => one.words), ...data.costs].map((text) => h("p", { text })), h("p", { class: "muted", text: data.chance }));
    const colours = new Map(sides.map((side) => [side.letter, seriesColour(side.colour)]));
    const names = new Map(sides.map((side) => [side.letter, `${side.letter} ${side.name}`]));
    const flags = data.partings.filter((one) => (one.noise ?? one.exact) !== null).map((one) => ({ round: one.noise ?? one.exact, severity: "note", label: `${data.sides[0].letter} and ${one.letter} diverge` }));
    const wanted = [...data.pictures.map((one) => [one.name, one]), ...data.differences.map((one) => [`difference.${one.name}`, one])];
    const rounds = data.pictures.flatMap((one) => one.lines.flatMap((line) => [line.rounds[0], line.rounds.at(-1)])).filter(Number.isFinite);
    if (rounds.length) {
      axis.empty ||= axis.whole; // a longer run may have been removed
      axis.extend(Math.min(...rounds), Math.max(...rounds));
      unbind ??= bindAxis(axis, params);
    }
    for (const [key, chart] of charts) if (!wanted.some(([name]) => name === key)) {
      chart.destroy();
      chart.host.remove();
      charts.delete(key);
    }
    for (const [key, picture] of wanted) {
      if (!charts.has(key)) charts.set(key, made(key, picture));
      const lines = picture.lines.map((line) => series(line, names, colours));
      if (key.startsWith("difference")) lines.unshift(level(data.sides[0].letter, picture.lines, names, colours));
      charts.get(key).update({ series: lines, flags, note: picture.note });
    }
    const order = ["accuracy", "loss", "gsc", "difference.accuracy", "difference.loss", "seconds", "bytes"];
    for (const key of order) if (charts.has(key)) pictures.append(charts.get(key).host);
    fill(figures, figureTable(data, marks));
    fill(troubles, troubleTable(data, marks));
    fill(settings, settingTable(data, marks));
  }

  function made(key, picture) {
    const host = h("div", { class: key === "gsc" ? "wide" : null, data: { picture: key } });
    pictures.append(host);
    const chart = lineChart(host, { title: picture.title, unit: picture.unit, axis, height: HEIGHT[picture.name] ?? 180, scale: picture.scale });
    return Object.assign(chart, { host });
  }
}

function series(line, names, colours) {
  const apart = line.low.some((low, i) => low !== line.high[i]);
  return { name: names.get(line.letter), colour: colours.get(line.letter), rounds: line.rounds, values: valuesOf(line), low: apart ? line.low : null, high: apart ? line.high : null };
}

/** The baseline itself, from which differences are measured: zero, over the longest of the runs. */
function level(letter, lines, names, colours) {
  const rounds = lines.flatMap((line) => [line.rounds[0], line.rounds.at(-1)]).filter(Number.isFinite);
  return { name: names.get(letter), colour: colours.get(letter), dash: true, rounds: [Math.min(...rounds), Math.max(...rounds)], values: [0, 0] };
}

/** Sides with their colours: those of the runs' positions in the address, so that a new baseline changes no colour. */
function arranged(data, runs) {
  const means = (side, run) => side.runs.includes(run) || side.name === run || side.runs.some((id) => id.startsWith(run));
  const sides = data.sides.map((side) => ({ ...side, asked: runs.filter((run) => means(side, run)) }));
  const place = (side) => Math.min(...side.asked.map((run) => runs.indexOf(run)), MOST);
  const order = [...sides].sort((a, b) => place(a) - place(b));
  return sides.map((side) => ({ ...side, colour: order.indexOf(side) }));
}

async function namesOf(ctx, runs, signal) {
  const told = await Promise.all(runs.map((run) => ctx.api.get(of(run), {}, signal).catch(() => null)));
  return Object.fromEntries(runs.map((run, i) => [run, told[i]?.name ?? run]));
}

function swatch(colour) {
  return h("span", { class: "swatch", "aria-hidden": "true", style: { background: seriesColour(colour) } });
}
