// SPDX-License-Identifier: Apache-2.0
// What if the round had been aggregated differently: without some clients, or by another rule. At once, from the tape.

import { of } from "../api.js";
import { bars } from "../charts/index.js";
import { fill, h } from "../dom.js";
import { number, percent, withUnit } from "../format.js";
import { command } from "./replay_state.js";

const RULES = {
  recorded: "the run’s own rule", fedavg: "mean by samples", median: "median", trimmed_mean: "trimmed mean, 10 % at each end", geometric_median: "geometric median",
  norm_clipping: "norm clipping", krum: "Krum", multi_krum: "multi-Krum",
};

export function whatIfPanel(ctx, cohort) {
  const { run, params } = ctx;
  const rule = h("select", { class: "field", on: { change: () => params.set({ rule: rule.value === "recorded" ? null : rule.value }) } },
    Object.entries(RULES).map(([value, text]) => h("option", { value, text })));
  const predicted = h("p", { class: "predicted", hidden: true });
  const [who, said, notes, way, picture] = [h("span", { class: "row" }), h("p", { class: "said", role: "status" }), h("p", { class: "small muted" }), h("div", {}), h("div", {})];
  const layers = bars(picture, { title: "how far the new step is from the recorded one, by layer; grey: the recorded step", maxHeight: 420 });
  let asked = 0;

  function out(found) {
    const gone = cohort.dropped();
    fill(who, h("span", { class: "muted", text: "without" }), gone.length
      ? gone.map((node) => h("span", { class: "chip" }, h("span", { class: "name", text: node }), h("button", { class: "tag-off", type: "button", "aria-label": `With ${node} again`, text: "✕", on: { click: () => cohort.leaveOut(gone.filter((one) => one !== node)) } })))
      : h("span", { class: "muted", text: "nobody: tick clients in the table" }),
    found.suspects.some((node) => !gone.includes(node)) && h("button", { class: "button quiet", type: "button", text: "leave out suspects", on: { click: () => cohort.leaveOut([...gone, ...found.suspects]) } }),
    gone.length > 0 && h("button", { class: "link-button", type: "button", text: "with everybody", on: { click: () => cohort.leaveOut([]) } }),
    !gone.length && found.client?.row?.state === "used" && h("button", { class: "link-button", type: "button", text: `without ${found.client.node}`, on: { click: () => cohort.leaveOut([found.client.node]) } }));
  }

  function tell(answer) {
    way.hidden = answer.ready;
    const score = answer.ready && answer.score;
    const changed = answer.dropped.length > 0 || answer.rule !== "recorded";
    predicted.hidden = !score || !changed;
    if (score && changed) fill(predicted, h("span", { class: "big", text: withUnit(score.changed, score.unit) }), ` ± ${errorOf(score.error, score.unit)} `,
      h("span", { text: `${score.name} after this round instead of ${withUnit(score.recorded, score.unit)}` }),
      h("span", { class: "muted small", text: ` (${score.difference >= 0 ? "+" : "−"}${errorOf(Math.abs(score.difference), score.unit)} ± ${errorOf(score.difference_error, score.unit)}, on ${number(score.samples)} test samples)` }));
    picture.hidden = !answer.ready || answer.layers.every((one) => one.apart === null);
    fill(way, !answer.ready && [h("p", { class: "small muted", text: "This computes what is missing, and goes on to the metrics:" }), command(answer.command)]);
    if (!answer.ready) {
      said.textContent = `That cannot be computed at once. ${answer.why}`;
      notes.textContent = "";
      return;
    }
    const unchanged = !answer.dropped.length && answer.rule === "recorded";
    said.textContent = unchanged
      ? answer.same ? "Aggregated again, the recorded updates give the recorded model, bit for bit. Tick clients, or choose another rule."
        : "Tick clients, or choose another rule."
      : sentence(answer);
    notes.textContent = answer.notes.join(" ");
    layers.update({
      bars: answer.layers.map((one) => ({ name: one.name, value: one.apart, of: one.recorded, text: `${number(one.apart)}${one.cosine === null ? "" : `  cos ${number(one.cosine)}`}` })),
      note: `against ${answer.against}; cos: of the two steps`,
    });
  }

  return {
    node: h("section", { class: "panel", id: "whatif" }, h("h2", { text: "what if" }),
      h("p", { class: "row" }, who, h("label", { class: "field-label" }, "aggregation", rule)), predicted, said, notes, way, picture),
    async show(found, signal) {
      const mine = ++asked;
      rule.value = params.get("rule", "recorded") in RULES ? params.get("rule", "recorded") : "recorded";
      out(found);
      try {
        const drop = cohort.dropped().map(encodeURIComponent).join(",");
        const answer = await ctx.api.get(of(run, "replay", found.round, "whatif"), { drop, rule: rule.value }, signal);
        if (mine === asked) tell(answer);
      } catch (error) {
        if (error.name === "AbortError" || mine !== asked) return;
        said.textContent = error.message;
        if (error.status === undefined) console.error(error);
      }
    },
    destroy: () => layers.destroy(),
  };
}

/** A standard error or a difference: in points for shares. */
const errorOf = (value, unit) => (unit === "share" ? `${number(100 * value)} points` : number(value));

function sentence(answer) {
  if (answer.recorded === null && answer.changed === null) return "The model stays NaN or infinite no matter who is left out: it was so before this round. Go back to the round in which it was lost.";
  const without = answer.dropped.length ? `Without ${answer.dropped.slice(0, 5).join(", ")}${answer.dropped.length > 5 ? ` and ${answer.dropped.length - 5} more` : ""}` : "";
  const by = answer.rule === "recorded" ? "" : `by ${RULES[answer.rule]}`;
  const change = [without, by].filter(Boolean).join(", ");
  const turned = answer.cosine === null ? "" : answer.cosine > 0.999 ? ", in the same direction" : `, cosine ${number(answer.cosine)}`;
  const opening = `${change[0].toUpperCase()}${change.slice(1)}`;
  const counted = `${number(answer.used)} of ${number(answer.of)} updates count.`;
  if (answer.recorded === null) return `${opening}, the model would have stayed finite, and moved by ${number(answer.changed)}; as recorded, it became NaN or infinite. ${counted}`;
  if (answer.changed === null) return `${opening}, the model would have become NaN or infinite. ${counted}`;
  return `${opening}, the model would have moved by ${number(answer.changed)} instead of ${number(answer.recorded)}${turned}, ` +
    `and be ${number(answer.apart)} away from where it is: ${percent(answer.share)} of the recorded step. ${counted}`;
}
