// SPDX-License-Identifier: Apache-2.0
// Topology: who exchanges messages with whom? The federation as it was in a round, with the health of nodes.

import { of } from "../api.js";
import { topologyPicture } from "../charts/index.js";
import { fill, h } from "../dom.js";
import { bytes, number, percent } from "../format.js";
import { held } from "../gesture.js";
import { go, link, runLink } from "../params.js";
import { rowTable } from "../parts/rows.js";

export const title = "Topology";
const KINDS = { star: "Star: every client talks to the server", clusters: "Clusters: clients that are alike share a model", tree: "Tree: clients talk to edges, edges to the server", rings: "Rings: clients pass the model on" };
const HEALTH = { critical: "■ critical", warning: "▲ warning", note: "· note", failed: "✕ failed", ok: "no finding", absent: "not in this round" };
const ROWS = 12;

export function view(root, ctx) {
  const { run, params } = ctx;
  const [said, picture, kinds, changed] = [h("p", { class: "said" }), h("div", {}), h("p", { class: "muted small" }), h("p", { class: "muted small" })];
  const slider = roundSlider(params);
  const counted = [h("span", { class: "sorted" }), h("span", { class: "sorted" })];
  const nodes = rowTable([
    { name: "name", text: "node", class: "name", cell: (row) => (row.role === "client" ? h("a", { href: runLink(run, "clients", row.name), text: row.name }) : row.name) },
    { name: "health", text: "health", cell: (row) => h("span", { class: `sev-${row.health}`, text: HEALTH[row.health] ?? row.health }) },
    { name: "issue", text: "what is wrong", class: "words", cell: (row) => (row.key ? h("a", { href: runLink(run, "findings", row.key), text: row.issue }) : row.issue ?? "") },
    { name: "group", text: "group", class: "name", cell: (row) => row.group ?? "" },
    { name: "sent", text: "sent", num: true, cell: (row) => bytes(row.sent) },
    { name: "received", text: "received", num: true, cell: (row) => bytes(row.received) },
  ], { key: (row) => row.name, caption: "Nodes, those with problems first" });
  const edges = rowTable([
    { name: "from", text: "from", class: "name", cell: (row) => row.sender },
    { name: "to", text: "to", class: "name", cell: (row) => row.receiver },
    { name: "bytes", text: "bytes", num: true, cell: (row) => bytes(row.bytes) },
    { name: "share", text: "share", num: true, cell: (row) => percent(row.share) },
    { name: "messages", text: "messages", num: true, cell: (row) => number(row.messages) },
  ], { key: (row) => `${row.sender}\u0000${row.receiver}`, caption: "Links, the largest first" });
  root.append(
    h("div", { class: "head" }, h("h1", { text: "Topology" }), h("span", { class: "muted", text: "who talks to whom?" }), slider.node),
    said, picture, kinds, changed,
    h("div", { class: "split" },
      h("section", { class: "panel" }, h("h2", {}, "nodes, those with problems first", counted[0]), nodes.node),
      h("section", { class: "panel" }, h("h2", {}, "links, the largest first", counted[1]), edges.node)));
  const drawing = topologyPicture(picture, {
    title: "the federation in this round",
    onNode: (node) => {
      const name = typeof node === "string" ? node : node?.name;
      const known = shown?.nodes.find((one) => one.name === name);
      if (known?.key) go(runLink(run, "findings", known.key));
      else if (known?.role === "client") go(link(runLink(run, "clients", known.name), { round: shown.round }));
    },
  });
  let shown = null;

  return {
    load(signal) {
      return ctx.api.get(of(run, "topology"), { round: params.get("round") }, signal);
    },

    show(found) {
      shown = found;
      slider.show(found);
      said.textContent = inWords(found);
      drawing.update({
        kind: found.kind,
        nodes: drawn(found),
        edges: found.edges.map((one) => ({ ...one, from: one.sender, to: one.receiver })),
        note: [found.joined ? "clients without a finding stand together, with their number" : "", `round ${found.round}`, "width: bytes; colour and shape: health"].filter(Boolean).join("; "),
      });
      kinds.textContent = found.kinds.length
        ? `${found.kinds.map((one) => `${one.kind} ${bytes(one.bytes)} in ${number(one.messages)} messages`).join("; ")}. Telemetry goes to the server past every edge, and is not drawn.`
        : "No transfers of this round were recorded: who talks to whom is not known, only who took part.";
      fill(changed, found.changed.length > 1 && ["The groups changed in round ", found.changed.map((round, i) => [i ? ", " : "", h("a", { href: link(runLink(run, "topology"), { round }), text: round })]), "."]);
      const order = ["critical", "warning", "failed", "note", "ok", "absent"];
      const ranked = found.nodes.filter((one) => one.role !== "server").sort((a, b) => order.indexOf(a.health) - order.indexOf(b.health) || b.sent + b.received - a.sent - a.received);
      [ranked, found.edges].forEach((all, i) => (counted[i].textContent = all.length > ROWS ? `${ROWS} of ${number(all.length)} shown` : ""));
      nodes.show(ranked.slice(0, ROWS), { nothing: "No node yet." });
      edges.show(found.edges.slice(0, ROWS), { nothing: "No transfers of this round were recorded." });
    },

    destroy: () => drawing.destroy(),
    keys: {
      "[": Object.assign(() => slider.step(-1), { label: "one round back" }),
      "]": Object.assign(() => slider.step(1), { label: "one round on" }),
    },
  };
}

/** The nodes of the picture. A cluster or a ring is no machine: only an edge of a tree has its own messages. */
function drawn(found) {
  const shown = found.kind === "tree" ? found.nodes : found.nodes.filter((one) => one.role !== "group" || (found.kind === "clusters" && found.groups > 1));
  return shown.map((one) => ({
    ...one, role: one.role === "group" ? "edge" : one.role, group: one.role === "group" && found.kind !== "tree" ? one.name : one.group,
    bytes: one.sent + one.received,
  }));
}

function inWords(found) {
  const ill = found.nodes.filter((one) => ["critical", "warning"].includes(one.health));
  const failed = found.nodes.filter((one) => one.health === "failed").reduce((sum, one) => sum + one.count, 0);
  const names = ill.slice(0, 3).map((one) => one.name).join(", ");
  return [
    `Round ${found.round}. ${KINDS[found.kind]}.`,
    `${number(found.took_part)} of ${number(found.clients)} clients took part${found.groups ? ` in ${found.groups} groups` : ""}${found.has_transfers ? `, ${bytes(found.bytes)} went over the wire` : ""}.`,
    ill.length ? `Problems: ${names}${ill.length > 3 ? ` and ${ill.length - 3} more` : ""}.` : "No node has a problem.",
    failed ? `${number(failed)} failed.` : "",
  ].filter(Boolean).join(" ");
}

/** Any round of the run, in the address; the newest unless one is selected. */
function roundSlider(params) {
  const range = h("input", { type: "range", id: "topology-round", step: 1, on: { input: () => (said.textContent = range.value), change: () => choose(Number(range.value)) } });
  const said = h("output", { for: "topology-round", class: "num" });
  const newest = h("button", { class: "link-button", type: "button", text: "newest", on: { click: () => params.set({ round: null }) } });
  let ends = [0, 0];
  const begins = held(range);
  const choose = (round) => params.set({ round: Math.max(ends[0], Math.min(ends[1], round)) }, { push: begins() });
  return {
    node: h("label", { class: "field-label" }, "round", range, said, newest),
    step: (by) => choose(Number(range.value) + by),
    show(found) {
      ends = [found.first, found.last];
      range.min = found.first;
      range.max = found.last;
      if (document.activeElement !== range || Number(range.value) !== found.round) range.value = found.round;
      said.textContent = found.round;
      newest.hidden = params.get("round") === null;
    },
  };
}
