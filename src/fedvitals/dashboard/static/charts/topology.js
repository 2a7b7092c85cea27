// SPDX-License-Identifier: Apache-2.0
// Who exchanges messages with whom: nodes in the colour and shape of their health, edges as wide as their traffic.

import { readable, severityColour, severityFill, severityRank, theme } from "../colour.js";
import { bytes, number, percent } from "../format.js";
import { createFrame } from "./frame.js";
import { isHub, isTree, placed } from "./layouts.js";
import { shape } from "./pen.js";
import { nearest, picking } from "./picking.js";
import { severityRow, troubled } from "./tip.js";

const NAMED = 36;
const WIDEST = 4.5;

/** Options: {title, height, onNode(node)}; data: {kind, nodes: [{name, role, group, health, bytes}], edges, note}. */
export function topologyPicture(host, options = {}) {
  const state = { kind: "", nodes: [], edges: [], spots: [], index: new Map(), most: 1 };
  const hooks = picking(() => frame, {
    find: (x, y) => nearest(state.spots, x, y),
    count: () => state.nodes.length,
    pick: options.onNode && ((at) => options.onNode(state.nodes[at])),
    told: (at) => spoken(state.nodes[at]),
  });
  const chart = {
    ...hooks,
    height: (width) => options.height ?? Math.max(280, Math.min(620, width * 0.6)),
    layout(width, height) {
      const [beside, below] = [width < 560 ? 90 : 150, isTree(state.kind) ? 110 : 60]; // for the names
      return { cx: width / 2, cy: height / 2, rx: (width - beside) / 2, ry: (height - below) / 2 };
    },
    heavy: () => state.nodes.length + state.edges.length > 1500,
    blank: () => (state.nodes.length ? null : "No node has been seen yet."),
    paint: (pen, box) => paint(pen, box, state),
    paintHover: (pen, box) => paintHover(pen, box, state, hooks.chosen),
    readout: () => (hooks.chosen < 0 ? "" : state.nodes[hooks.chosen].name),
    tip: () => (hooks.chosen < 0 ? null : tip(state, hooks.chosen)),
    summary: () => summary(state, options),
    csv: () => [["from", "to", "bytes", "share"], ...state.edges.map((edge) => [edge.from, edge.to, edge.bytes, edge.share])],
    spot: () => state.spots[hooks.chosen] ?? null,
  };
  const frame = createFrame(host, "topology", options, chart);
  return {
    frame,
    update({ kind = "star", nodes = [], edges = [], note = "" } = {}) {
      // The given order is the order of the positions, or the picture would jump whenever a node's health changes.
      const order = nodes.map((_, at) => at).sort((a, b) => severityRank(nodes[a].health) - severityRank(nodes[b].health));
      const most = edges.reduce((high, edge) => Math.max(high, edge.bytes ?? 0), 0) || 1;
      Object.assign(state, { kind, nodes, order, edges, most, aspect: 0, index: new Map(nodes.map((node, at) => [node.name, at])) });
      hooks.chosen = Math.min(hooks.chosen, nodes.length - 1);
      frame.setNote(note);
      frame.fed();
    },
    destroy: () => frame.destroy(),
  };
}

/** Positions are in units of the shorter half, so that a circle stays one in any box. */
function stand(state, box) {
  const unit = Math.min(box.rx, box.ry);
  const aspect = [box.rx / unit, box.ry / unit];
  if (String(aspect) !== String(state.aspect)) {
    state.aspect = aspect;
    state.places = placed(state.kind, state.nodes, state.edges, aspect);
  }
  state.spots = state.nodes.map((node) => {
    const at = state.places.get(node.name) ?? { x: 0, y: 0 };
    return { x: box.cx + at.x * unit, y: box.cy + at.y * unit };
  });
}

function paint(pen, box, state) {
  const colours = theme();
  stand(state, box);
  for (const edge of state.edges) paintEdge(pen, state, edge, { stroke: colours.ink2, opacity: opacity(state, edge) });
  const many = state.nodes.length > NAMED;
  const tree = isTree(state.kind);
  const apart = tree ? spacing(state) : Infinity;
  state.order.forEach((at) => {
    const node = state.nodes[at];
    paintNode(pen, node, state.spots[at], state.nodes.length > 200 ? 7 : 11, colours);
    const ill = severityRank(node.health) > 1;
    if (tree && !isHub(node)) paintLeaf(pen, node, state.spots[at], ill, apart, colours);
    else if (!many || ill || isHub(node)) paintName(pen, box, node, state.spots[at], ill, colours);
  });
}

function opacity(state, edge) {
  // A thousand lines into one point would be a blot: the more there are, the fainter each.
  const dense = Math.min(1, Math.max(0.06, 60 / state.edges.length));
  return dense * (0.3 + 0.45 * Math.sqrt((edge.bytes ?? 0) / state.most));
}

function paintEdge(pen, state, edge, style) {
  const [from, to] = [state.spots[state.index.get(edge.from)], state.spots[state.index.get(edge.to)]];
  if (!from || !to) return;
  const width = Math.max(0.75, Math.sqrt((edge.bytes ?? 0) / state.most) * (state.edges.length > 60 ? WIDEST / 2 : WIDEST));
  pen.line(from.x, from.y, to.x, to.y, { ...style, width });
}

function paintNode(pen, node, { x, y }, size, colours) {
  const ill = severityRank(node.health) > 0;
  const outline = { stroke: colours.paper, width: 2 };
  if (isHub(node)) {
    // A hub is a ring, whatever its health: the shape inside shows that.
    pen.disc(x, y, size * 0.95, { fill: colours.paper, stroke: ill ? severityColour(node.health) : colours.ink, width: 2 });
    if (ill) shape(pen, node.health, x, y, size, { fill: severityFill(node.health) });
    else pen.disc(x, y, size * 0.4, { fill: colours.ink });
    return;
  }
  if (ill) {
    shape(pen, node.health, x, y, size + 6, { fill: colours.paper });
    shape(pen, node.health, x, y, size + 2, { fill: severityFill(node.health), stroke: severityColour(node.health) });
  } else {
    const fill = node.health === "ok" || node.health === "healthy" ? colours["ok-fill"] : colours.ink2;
    pen.disc(x, y, size / 2, { fill, ...outline });
  }
}

/** Pixels between the leaves of a tree. */
function spacing(state) {
  const xs = state.spots.filter((_, at) => !isHub(state.nodes[at])).map((spot) => spot.x).sort((a, b) => a - b);
  return xs.length > 1 ? (xs.at(-1) - xs[0]) / (xs.length - 1) : 120;
}

function paintLeaf(pen, node, { x, y }, ill, apart, colours) {
  if (apart < 11 && !ill) return;
  const style = { fill: ill ? readable(severityColour(node.health), colours) : colours.ink2, weight: ill ? 600 : 400, halo: colours.paper };
  if (apart >= 34) pen.text(x, y + 20, node.name, { ...style, anchor: "middle", room: apart - 6 });
  else pen.text(x + 4, y + 12, node.name, { ...style, anchor: "end", turn: -90, room: 60 });
}

/** Beside the node, on the side away from the middle. */
function paintName(pen, box, node, { x, y }, ill, colours) {
  const hub = isHub(node);
  const away = Math.abs(x - box.cx) < 8 || hub ? "middle" : x > box.cx ? "start" : "end";
  const shift = away === "middle" ? 0 : away === "start" ? 11 : -11;
  const down = away === "middle" ? (y < box.cy && !hub ? -13 : 23) : 4;
  const fill = ill ? readable(severityColour(node.health), colours) : colours.ink2;
  const weight = ill || hub ? 600 : 400;
  pen.text(x + shift, y + down, node.name, { anchor: away, fill, weight, room: 120, halo: colours.paper });
}

function paintHover(pen, box, state, chosen) {
  const spot = state.spots[chosen];
  if (!spot) return;
  const colours = theme();
  const { name } = state.nodes[chosen];
  const own = state.edges.filter((edge) => edge.from === name || edge.to === name);
  for (const edge of own) paintEdge(pen, state, edge, { stroke: colours.accent, opacity: 0.9 });
  pen.disc(spot.x, spot.y, 11, { stroke: colours.ink, width: 1.5 });
}

function tip(state, chosen) {
  const node = state.nodes[chosen];
  const own = state.edges.filter((edge) => edge.from === node.name || edge.to === node.name);
  const rows = severityRow(node.health);
  if (node.role) rows.push({ name: "role", value: String(node.role) });
  if (node.group !== null && node.group !== undefined && node.group !== "") rows.push({ name: "group", value: String(node.group) });
  if (node.bytes !== null && node.bytes !== undefined) rows.push({ name: "sent and received", value: bytes(node.bytes) });
  const top = [...own].sort((a, b) => (b.bytes ?? 0) - (a.bytes ?? 0)).slice(0, 3);
  for (const edge of top) {
    const other = edge.from === node.name ? `to ${edge.to}` : `from ${edge.from}`;
    rows.push({ name: other, value: bytes(edge.bytes) + (Number.isFinite(edge.share ?? NaN) ? `  ${percent(edge.share)}` : "") });
  }
  return { head: node.name, rows, foot: own.length > 3 ? `${number(own.length)} links` : "" };
}

function spoken(node) {
  const moved = node.bytes === null || node.bytes === undefined ? "" : bytes(node.bytes);
  return [node.name, node.role, node.health, moved].filter(Boolean).join(", ");
}

function summary(state, options) {
  const ill = state.nodes.filter((node) => severityRank(node.health) > 1).map((node) => node.name);
  const size = `${number(state.nodes.length)} nodes, ${number(state.edges.length)} links`;
  return `${options.title ?? "Topology"}, ${state.kind}, ${size}; ${troubled(ill)}`;
}
