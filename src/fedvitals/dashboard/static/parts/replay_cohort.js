// SPDX-License-Identifier: Apache-2.0
// Who answered in a round, and one client against all others: norms layer by layer, directions, local losses.

import { bars, lineChart, matrix } from "../charts/index.js";
import { fill, h } from "../dom.js";
import { exact, number, percent } from "../format.js";
import { link, runLink } from "../params.js";
import { digest } from "./replay_state.js";
import { remade } from "./band.js";
import { rowTable } from "./rows.js";
import { nameOf } from "./who.js";

export const ROWS = 20;
const CELLS = 40; // clients and layers that a picture shows
const STATES = { used: "✓ used", "left out": "▲ left out", failed: "✕ failed" };
const SEVERITY = { used: "muted", "left out": "sev-warning", failed: "sev-critical" };

/** The text for a norm that is missing, NaN or infinite. */
const measured = (row, value) => (value === null && row.state !== "failed" ? "NaN" : number(value));

export function cohortPanel(ctx, choose) {
  const { params } = ctx;
  const [said, more, picture] = [h("p", { class: "small muted" }), h("p", { class: "row" }), h("div", {})];
  const table = rowTable([], { key: (row) => row.node, caption: "Who answered in this round" });
  const map = remade(picture, (host, how) => matrix(host, { ...how, colours: "signed", onCell: (row) => choose(row) }));
  let suspects = []; // of this round: left out unless the user chooses otherwise
  const dropped = () => (params.get("drop") ? params.list("drop").map(decodeURIComponent) : params.get("keep") === "all" ? [] : suspects);
  function leaveOut(nodes) {
    params.set({ drop: [...new Set(nodes)].map(encodeURIComponent).join(",") || null, keep: nodes.length ? null : "all" });
  }
  const drop = (node, out) => leaveOut(out ? [...dropped(), node] : dropped().filter((one) => one !== node));

  function columnsOf(found) {
    const grouped = found.cohort.some((row) => row.group !== null);
    return [
      { name: "node", text: "client", class: "name", sort: "name", cell: (row) => [h("button", { class: "link-button", type: "button", "aria-pressed": String(row.node === params.get("node")), on: { click: () => choose(row.node === params.get("node") ? null : row.node) } }, nameOf(row.node)), suspects.includes(row.node) && h("span", { class: "sev-warning small nowrap", title: "suspected in a finding of this round", text: " ▲ suspect" })] },
      { name: "drop", text: "without", cell: (row) => row.state === "used" && h("input", { type: "checkbox", "aria-label": `What if without ${row.node}`, checked: dropped().includes(row.node), on: { change: (event) => drop(row.node, event.target.checked) } }) },
      { name: "state", text: "its update", cell: (row) => h("span", { class: SEVERITY[row.state], title: row.why, text: STATES[row.state] }) },
      found.cohort.some((row) => row.why) && { name: "why", text: "why", class: "words", cell: (row) => h("span", { class: "small", text: row.why }) },
      grouped && { name: "group", text: "group", class: "name", cell: (row) => row.group ?? "" },
      { name: "weight", text: "weight", num: true, sort: "weight", cell: (row) => [number(row.weight), row.share !== null && h("span", { class: "muted small", text: ` ${percent(row.share)}` })] },
      { name: "norm", text: "norm", num: true, sort: "norm", title: `Norm ${found.norms}.`, cell: (row) => h("span", { title: exact(row.norm), text: measured(row, row.norm) }) },
      { name: "ratio", text: "to the median", num: true, cell: (row) => (row.ratio === null ? "–" : `× ${number(row.ratio)}`) },
      { name: "first", text: "first loss", num: true, sort: "first", cell: (row) => h("span", { title: exact(row.first_loss), text: row.steps ? measured(row, row.first_loss) : "–" }) },
      { name: "last", text: "last loss", num: true, sort: "last", cell: (row) => h("span", { title: exact(row.last_loss), text: row.steps ? measured(row, row.last_loss) : "–" }) },
      { name: "digest", text: "digest", cell: (row) => [digest(row.digest, row.whole), row.whole && h("span", { class: "muted small", text: " whole" })] },
    ].filter(Boolean);
  }

  return {
    node: h("section", { class: "panel cohort" }, h("h2", { text: "who answered" }), said, table.node, more),
    picture,
    dropped,
    leaveOut,
    show(found) {
      suspects = found.suspects;
      const parts = [`${number(found.used)} used`, found.left_out && `${number(found.left_out)} left out`, found.failed && `${number(found.failed)} failed`, found.lost && `${number(found.lost)} for which the tape had no room`];
      said.textContent = `${number(found.total)} answered: ${parts.filter(Boolean).join(", ")}. ${number(found.whole)} of their updates are on the tape whole.`;
      const sort = params.get("sort", "trouble");
      if (sort === "trouble") said.textContent += ` ${suspects.length ? "Suspects first, then those that failed or were left out" : "Failed and left out first"}, then the furthest from the median.`;
      table.show(found.cohort, { columns: columnsOf(found), sort, onSort: (to) => params.set({ sort: to, page: null }), nothing: "Nobody answered in this round." });
      const page = Math.floor(found.offset / ROWS);
      const step = (to, text) => h("button", { class: "link-button", type: "button", text, on: { click: () => params.set({ page: to || null }) } });
      fill(more, found.total > ROWS && [
        h("span", { class: "muted", text: `clients ${number(found.offset + 1)} to ${number(Math.min(found.total, found.offset + ROWS))} of ${number(found.total)}` }),
        page > 0 && step(page - 1, "previous"), found.offset + ROWS < found.total && step(page + 1, "next"),
      ]);
      const rows = found.cohort.filter((row) => row.state !== "failed" && row.layers.length).slice(0, CELLS);
      const layers = found.norm_layers.slice(0, CELLS);
      picture.hidden = rows.length < 2 || layers.length < 2;
      const values = new Float32Array(rows.flatMap((row) => layers.map((_, i) => row.layers[i] ?? NaN)));
      const most = Math.max(1, ...values.map((one) => (Number.isFinite(one) ? Math.abs(one) : 0)));
      if (!picture.hidden) map.with({ title: "all of them, layer by layer" }).update({
        rows: rows.map((row) => row.node), columns: layers, values, low: -most, high: most,
        note: [`log₂ of the norm over the median client’s: 1 is twice, −1 half`, rows.length < found.total ? `${rows.length} of ${number(found.total)} clients` : "", layers.length < found.norm_layers.length ? `${layers.length} of ${found.norm_layers.length} layers` : ""].filter(Boolean).join("; "),
      });
    },
    destroy: () => map.destroy(),
  };
}

/** One client compared with its cohort. */
export function clientPanel(ctx, choose) {
  const { run } = ctx;
  const [title, said, directions, norms, losses, body] = [h("h2", {}), h("p", {}), h("p", { class: "small muted" }), h("div", {}), h("div", {}), h("div", { class: "stack" })];
  const names = h("datalist", { id: "replay-clients" });
  const field = h("input", {
    class: "field client-field", type: "search", list: "replay-clients", placeholder: "a client", maxlength: 1000, autocomplete: "off",
    on: { change: () => choose(field.value.trim() || null) },
  });
  body.append(norms, losses);
  const lengths = bars(norms, { title: "its norm, layer by layer", maxHeight: 420 });
  const chart = lineChart(losses, { title: "its local loss, step by step", height: 200 });

  return {
    node: h("section", { class: "panel" }, title, h("p", { class: "row" }, h("label", { class: "field-label" }, "client", field, names)), said, directions, body),
    show(found) {
      const one = found.client;
      title.textContent = one ? `${one.node} against the other clients` : "one client against the others";
      fill(names, found.nodes.slice(0, 2000).map((node) => h("option", { value: node })));
      if (document.activeElement !== field) field.value = one?.node ?? "";
      body.hidden = !one?.there;
      directions.hidden = !one?.there;
      if (!one) {
        said.textContent = "Choose a client in the table, or by its name.";
        return;
      }
      fill(said, one.there ? told(one) : `${one.node} did not answer in this round: it was not asked, or nothing of it is on the tape.`,
        " ", h("a", { href: link(runLink(run, "clients", one.node), { round: found.round }), text: "its page" }));
      directions.textContent = one.cosine === null ? one.cosines : `Cosine ${one.cosines}: ${number(one.cosine)}.`;
      lengths.update({
        bars: one.layers.map((layer) => ({
          name: layer.name, value: layer.norm, mark: layer.median,
          text: `${layer.ratio === null ? number(layer.norm) : `× ${number(layer.ratio)}`}${layer.cosine === null ? "" : `  cos ${number(layer.cosine)}`}`,
        })),
        note: `${one.norms}; mark and ×: the median of ${number(one.clients)}${one.cosine === null ? "" : "; cos: to the mean"}`,
      });
      losses.hidden = !one.losses.length;
      const steps = one.losses.map((_, i) => i * one.every);
      chart.update({
        xs: { labels: steps.map((step) => `step ${step}`) },
        series: [{ name: one.node, rounds: one.losses.map((_, i) => i), values: one.losses }],
        note: one.every > 1 ? `every ${one.every}th of its steps` : `${number(one.losses.length)} steps`,
      });
    },
    destroy() {
      lengths.destroy();
      chart.destroy();
    },
  };
}

function told(one) {
  const { row } = one;
  const much = row.ratio === null ? "" : row.ratio > 1.05 ? `, ${number(row.ratio)} times the median client’s` : row.ratio < 0.95 ? `, ${percent(row.ratio)} of the median client’s` : ", as the median client’s";
  return [
    row.state === "used" ? `Its update was used, with a weight of ${number(row.weight)}${row.share === null ? "" : ` (${percent(row.share)})`}.` : row.state === "failed" ? `It failed: ${row.why}` : `Its update was left out: ${row.why}`,
    row.norm === null ? "" : `Norm ${number(row.norm)}${much}.`,
    row.steps ? `${number(row.steps)} local steps, loss ${number(row.first_loss)} to ${number(row.last_loss)}.` : "",
  ].filter(Boolean).join(" ");
}
