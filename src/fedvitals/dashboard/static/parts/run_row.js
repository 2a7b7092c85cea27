// SPDX-License-Identifier: Apache-2.0
// One run in the list. Its elements stay and get new text: focus and selection survive every change.

import { changing } from "../access.js";
import { sparkline } from "../charts/sparkline.js";
import { fill, h } from "../dom.js";
import { ago, bytes, exact, exactly, number, seconds, when, withUnit } from "../format.js";
import { link, runLink } from "../params.js";
import { addressOf } from "../root.js";
import { findingCounts, healthMark, stateNow } from "./health.js";

export function runRow(run, acts) {
  const id = run.id;
  const at = () => row.run;
  const box = h("input", { type: "checkbox", "aria-label": `Select ${run.name}`, on: { change: () => acts.select(id, box.checked) } });
  const name = h("a", { class: "name run-link", href: runLink(id) });
  const tags = h("span", { class: "tags" });
  const headline = h("a", { class: "headline" });
  const cell = (kind, ...children) => h("td", { class: kind }, children);
  const health = cell("health-cell");
  const bar = h("span", {});
  const rounds = h("span", { class: "nowrap" });
  const state = h("span", { class: "run-state nowrap" });
  const spark = cell("spark-cell");
  const last = cell("num");
  const findings = cell("nowrap findings-cell");
  const facts = Object.fromEntries(["duration", "bytes", "clients", "host", "started"].map((key) => [key, cell(key === "host" ? "more" : "num more")]));
  const more = h("button", changing({ class: "link-button small", type: "button", text: "+ tag", "aria-label": `Tags of ${run.name}`, on: { click: () => acts.tags(at()) } }));
  const gone = h("button", changing({ class: "icon-button", type: "button", text: "✕", title: "Delete", "aria-label": `Delete ${run.name}`, on: { click: () => acts.remove(at()) } }));
  const row = h("tr", { data: { run: id } }, cell("", box), health,
    cell("run-cell", h("div", { class: "run-line" }, name, tags, more), headline),
    cell("progress-cell", h("div", { class: "run-line" }, rounds, state), h("div", { class: "bar", "aria-hidden": "true" }, bar)),
    spark, last, findings, Object.values(facts), cell("num", gone));

  row.show = (now, selected) => {
    box.checked = selected;
    row.setAttribute("aria-selected", String(selected));
    const same = row.run && JSON.stringify(row.run) === JSON.stringify(now);
    row.run = now;
    if (!same) words(now);
    row.tick();
  };

  row.tick = () => {
    const said = stateNow(row.run);
    state.className = `run-state nowrap ${said.state}`;
    state.textContent = said.text;
    state.title = said.title;
    facts.started.textContent = ago(row.run.started);
  };

  function words(now) {
    name.textContent = now.name;
    name.title = now.id;
    fill(tags, now.tags.map((tag) => h("a", { class: "tag", href: link(addressOf("/"), { tag }), title: `Runs tagged ${tag}`, text: tag })));
    fill(health, healthMark(now.health, now.findings));
    headline.textContent = now.headline;
    headline.title = now.headline;
    headline.setAttribute("href", now.key === null ? runLink(id) : runLink(id, "findings", now.key));
    const planned = now.planned ?? (now.finished === null ? null : now.rounds);
    rounds.textContent = now.planned === null ? `${number(now.rounds)} rounds` : `${number(now.rounds)}/${number(now.planned)}`;
    rounds.title = now.planned === null ? "how many there shall be is not known" : "rounds so far, and planned";
    bar.style.width = `${planned ? Math.min(100, (100 * now.rounds) / planned) : 0}%`;
    measured(now);
  }

  function measured(now) {
    const one = now.spark;
    fill(spark, one ? sparkline(one.values, { unit: one.name === "accuracy" ? "share" : "", width: 120, height: 24, label: `${one.name} over ${number(one.rounds.length)} points` }) : h("span", { class: "muted", text: "–" }));
    spark.title = one ? `${one.name}, ${one.of}` : "neither accuracy nor loss was measured";
    const value = now.accuracy ?? now.loss;
    fill(last, withUnit(value, now.accuracy === null ? "1" : "share"), now.accuracy === null && now.loss !== null && h("small", { class: "muted", text: " loss" }));
    last.title = value === null ? "" : `${now.accuracy === null ? "loss" : "accuracy"} ${exactly(value, now.accuracy === null ? "1" : "share")}`;
    fill(findings, findingCounts(now.findings));
    facts.duration.textContent = seconds(now.seconds);
    facts.duration.title = now.seconds === null ? "" : `${exact(now.seconds)} s`;
    facts.bytes.textContent = bytes(now.bytes);
    facts.bytes.title = now.bytes === null ? "no messages were recorded" : `${exact(now.bytes)} bytes`;
    facts.clients.textContent = number(now.clients);
    facts.host.textContent = [now.host, now.topology].filter(Boolean).join(" · ");
    facts.started.title = when(now.started);
  }
  return row;
}
