// SPDX-License-Identifier: Apache-2.0
// Who behaves alike: the updates of a round as points, close together if their directions are similar, and as a matrix.

import { decodeGrid, of } from "../api.js";
import { matrix, scatter } from "../charts/index.js";
import { fill, h } from "../dom.js";
import { number, percent } from "../format.js";
import { held } from "../gesture.js";
import { go, link, runLink } from "../params.js";
import { chooser, remade } from "../parts/band.js";
import { nothing } from "../parts/states.js";

export const title = "Map";
const SAMPLE = 5; // rounds, spread over the run, that determine the extent of the plane
const PADDING = 0.08; // of that extent, at each side
const MANY = 1000; // clients from which that would be slow: then the plane grows with the rounds viewed
const KEEP = `monitor = fv.Monitor("runs.db", privacy=3, probes="standard")`;

export function view(root, ctx) {
  const { run, params } = ctx;
  let now = null;
  const slider = h("input", {
    type: "range", min: 0, max: 0, step: 1, class: "round-slider", "aria-label": "Round",
    on: { input: () => show(now.rounds[slider.value]) },
  });
  const label = h("output", { class: "num round-said" });
  const colour = chooser(ctx, "colour by", "colour");
  const space = chooser(ctx, "projection", "plane");
  const order = chooser(ctx, "order", "order");
  const names = h("datalist", { id: "map-clients" });
  const choose = h("input", {
    class: "field client-field", type: "search", list: "map-clients", placeholder: "none", maxlength: 1000, autocomplete: "off",
    on: { change: () => params.set({ client: choose.value.trim() || null }) },
  });
  const chosen = h("p", { class: "small map-chosen", role: "status" });
  const [plane, square, none, body] = [h("div", {}), h("div", {}), h("div", {}), h("div", { class: "stack" })];
  const pick = (name) => params.set({ client: params.get("client") === name ? null : name });
  const points = remade(plane, (host, how) => scatter(host, { ...how, onPoint: (point) => pick(point?.name ?? point) }));
  const alike = remade(square, (host, how) => matrix(host, {
    ...how, colours: "signed", onCell: (row, column) => pick(params.get("client") === row ? column : row),
  }));
  body.append(
    h("div", { class: "row map-controls" },
      h("label", { class: "field-label round-pick" }, "round", slider, label),
      space.node, colour.node, order.node, h("label", { class: "field-label" }, "path of", choose, names)),
    chosen, h("div", { class: "map-pair" }, plane, square));
  root.append(h("div", { class: "head" }, h("h1", { text: "Who behaves alike" })), none, body);

  const begins = held(slider);
  function show(round) {
    if (round !== undefined) params.set({ round: round === now.rounds.at(-1) ? null : round }, { push: begins() });
  }
  const step = (by, text) => Object.assign(() => {
    if (!now?.rounds.length) return;
    show(now.rounds[Math.max(0, Math.min(now.rounds.length - 1, now.rounds.indexOf(now.round) + by))]);
  }, { label: text });

  const get = (round, signal, node = null) => ctx.api.get(of(run, "map"), { round, node, plane: params.get("plane") }, signal);
  let known = null; // {plane, reach, order}: shared by all rounds of the run, so that they can be compared

  /** The extent of the run's points, and the order of its newest round: requested once, then kept. */
  async function shared(data, signal) {
    const plane = params.get("plane", "run");
    if (known?.plane === plane || data.round === null) return;
    const last = data.rounds.length - 1;
    const some = data.total > MANY ? [last] : Array.from({ length: SAMPLE }, (_, i) => Math.round((last * i) / (SAMPLE - 1)));
    const found = await Promise.all([...new Set(some)].map((at) => get(data.rounds[at], signal)));
    known = { plane, reach: null, order: known?.order ?? found.at(-1).similarity.names };
    for (const one of found) widen(known, one.points);
  }

  return {
    async load(signal) {
      const data = await get(params.number("round"), signal, params.get("client"));
      await shared(data, signal);
      return data;
    },

    show(data) {
      now = data;
      body.hidden = data.round === null;
      fill(none, data.round === null && nothing("No sketches, hence no map.",
        "The map is drawn from sketches of the clients’ updates: 256 numbers each. They are kept from the preset «standard» on, and leave a client " +
        "from privacy level 3 on; a server that holds the updates itself makes them at every level. Secure aggregation hides single updates, and leaves none.", null, KEEP));
      if (data.round === null) return;
      slider.max = data.rounds.length - 1;
      slider.value = data.rounds.indexOf(data.round);
      slider.setAttribute("aria-valuetext", `round ${data.round}`);
      label.textContent = String(data.round);
      const groups = data.points.some((point) => point.group !== null);
      const by = groups ? params.get("colour", "health") : "health";
      colour.show([["", [["health", "health"], ["group", "group"]]]], by);
      colour.node.hidden = !groups;
      space.show([["", [["run", "of the whole run"], ["round", "of this round"]]]], params.get("plane", "run"));
      order.show([["", [["run", "the same for all rounds"], ["round", "clustered for this round"]]]], params.get("order", "run"));
      draw(data, by);
      about(data);
    },

    keys: { ",": step(-1, "one round back"), ".": step(1, "one round on") },

    destroy() {
      points.destroy();
      alike.destroy();
    },
  };

  function draw(data, by) {
    widen(known, data.points);
    points.with({ title: "updates by direction" }).update({
      points: data.points.map((point) => ({
        name: point.name, x: point.x, y: point.y, group: by === "group" ? point.group : null,
        severity: by === "health" ? point.severity : null,
      })),
      trail: data.trail.length ? data.trail : null,
      reach: padded(known.reach),
      note: [
        `round ${data.round}`,
        `the projection shows ${percent(data.shares[0] + data.shares[1])} of this round’s spread`,
        data.points.length < data.total ? `${number(data.points.length)} of ${number(data.total)} clients` : `${number(data.total)} clients`,
        data.unusable ? `${number(data.unusable)} left out: zero or not finite` : "",
      ].filter(Boolean).join("; "),
    });
    const shown = params.get("order", "run") === "round" ? decoded(data.similarity) : inOrder(decoded(data.similarity), known.order);
    const { values } = shown;
    const most = largest(values, shown.names.length);
    alike.with({ title: "cosines of updates" }).update({
      rows: shown.names, columns: shown.names, values, low: -most, high: most,
      note: [
        `round ${data.round}`,
        shown.names.length < shown.total ? `${number(shown.names.length)} of ${number(shown.total)} clients: ${shown.chosen}` : "",
        params.get("order", "run") === "round" ? "neighbours are alike" : "in the order of the newest round",
        "from sketches, good to ± 0.06",
      ].filter(Boolean).join("; "),
    });
  }

  function about(data) {
    const mine = params.get("client");
    if (document.activeElement !== choose) choose.value = mine ?? "";
    const list = JSON.stringify(data.similarity.names);
    if (names.dataset.of !== list) {
      names.dataset.of = list;
      names.replaceChildren(...data.points.slice(0, 1000).map((point) => h("option", { value: point.name })));
    }
    const there = data.points.find((point) => point.name === mine);
    fill(chosen, mine === null
      ? h("span", { class: "muted", text: "Points near each other train in the same direction. Choose one to see where it came from." })
      : [h("a", { href: link(runLink(run, "clients", mine), { round: data.round }), text: mine }),
        h("span", { class: "muted", text: there ? trailWords(data) : ` is not in round ${data.round}.` })]);
  }
}

/** The plane as wide as all points seen so far need. */
function widen(known, points) {
  for (const name of ["x", "y"]) {
    const before = known.reach?.[name] ?? [0, 0];
    const own = points.map((point) => point[name]);
    known.reach = { x: [0, 0], y: [0, 0], ...known.reach, [name]: [Math.min(before[0], ...own), Math.max(before[1], ...own)] };
  }
}

function padded(reach) {
  return Object.fromEntries(Object.entries(reach).map(([name, [low, high]]) => [name, [low - PADDING * (high - low), high + PADDING * (high - low)]]));
}

const decoded = (similarity) => ({ ...similarity, values: decodeGrid({ values: similarity.values, state: "" }).values });

/** The matrix in the order of the run; clients that are not in it come last. */
function inOrder(shown, order) {
  const place = new Map(order.map((name, at) => [name, at]));
  const from = shown.names.map((_, at) => at).sort((a, b) => (place.get(shown.names[a]) ?? Infinity) - (place.get(shown.names[b]) ?? Infinity) || a - b);
  const count = from.length;
  const values = new Float32Array(count * count);
  from.forEach((row, i) => from.forEach((column, j) => (values[i * count + j] = shown.values[row * count + column])));
  return { ...shown, names: from.map((at) => shown.names[at]), values };
}

/** The range of nearly all cosines, except those of a client with itself: the ends of the colours. */
function largest(values, count) {
  const sizes = values.filter((_, at) => Math.floor(at / count) !== at % count).map(Math.abs).sort();
  return sizes.length ? Math.max(0.1, sizes[Math.floor(0.98 * (sizes.length - 1))]) : 1;
}

function trailWords(data) {
  const first = data.trail[0]?.round;
  return data.trail.length > 1 ? `, and its way here since round ${first}.` : ".";
}
