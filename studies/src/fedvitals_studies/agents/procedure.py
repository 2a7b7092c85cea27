# SPDX-License-Identifier: Apache-2.0
"""A written procedure that names the culprit and the cause of a run from the answers of three calls.

It stands in for an agent: it only sees the JSON that the tools return, and calls neither `findings` nor `query`. Its
limits were set on the seeds from `planted_runs.TUNING` on, and are judged on others.

1. `overview`: a client that failed or was absent in two or more rounds, and nobody else did: «client fails».
2. `evidence` of all clients. Values that are not finite: the client that had them first: «values not finite».
3. The client with the most signs of training that last. Too few or too small: look at machines and links instead; a
   client whose computing became slow after the first round is a «slow client», else the run is healthy.
4. `evidence` of that client, its 40 strongest signs; one that is missing is as usual. Which signs differ decides the
   cause, from the most specific to the least:
   learning rate by the optimiser's own setting or by the weights' way; an update that is larger than the weights'
   own way: «scaled update»; wrong labels by the losses on its own samples; then by direction: against the others
   is «flipped update», across them «noise for an update».
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fedvitals.agents.tools import Tools
from fedvitals_studies.agents.planted_runs import HEALTHY

FEWEST_FAILURES = 2
LASTING = 4.5  # score from which a lasting sign counts
SLOW = 4.5  # score of a client's computing time
ACROSS = 0.2  # cosine to the others' mean, below whose absolute value an update is across theirs
LESS = 0.25  # accuracy during training, below the others', of labels that cannot be learnt
LABELS = ("fit.loss_before", "train.loss", "train.loss_first", "train.accuracy", "fit.accuracy_before", "local.loss",
          "fit.confident_wrong", "train.confident_wrong")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decision:
    """The procedure's conclusion, and how much it had to read."""

    client: str | None
    cause: str
    bytes: int
    calls: int


class _Caller:
    """Calls tools and counts the bytes of their answers."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.bytes = self.calls = 0

    def __call__(self, tool: str, **arguments: Any) -> dict[str, Any]:
        text = getattr(self._tools, tool)(**arguments)
        self.bytes += len(text.encode())
        self.calls += 1
        result: dict[str, Any] = json.loads(text)["result"]
        return result


def decide(tools: Tools, run: str) -> Decision:
    """Name the culprit and the cause of a run."""
    call = _Caller(tools)
    client, cause = _concluded(call, run)
    return Decision(client, cause, call.bytes, call.calls)


def _concluded(call: _Caller, run: str) -> tuple[str | None, str]:
    overview = call("overview", run=run)
    failing = {row["client"] for row in overview["failures"] if row["times"] >= FEWEST_FAILURES}
    absent = {row["client"] for row in overview["absent"] if row["of"] - row["attended"] >= FEWEST_FAILURES}
    if len(failing | absent) == 1:
        return (failing | absent).pop(), "client fails"
    evidence = call("evidence", run=run)
    odd = [row for row in evidence["training"] if row.get("not_finite")]
    if odd:
        first = min(row["not_finite_since"] for row in odd)
        return Counter(row["client"] for row in odd if row["not_finite_since"] == first).most_common(1)[0][0], (
            "values not finite"
        )
    suspect = _suspect(evidence["training"])
    if suspect is None:
        return _slow(evidence["system"])
    own = call("evidence", run=run, client=suspect, limit=40)
    return suspect, _cause({row["sign"]: row for row in own["training"]})


def _suspect(rows: list[dict[str, Any]]) -> str | None:
    """Return the client whose lasting signs add up to most; None if they are small."""
    sums: Counter[str] = Counter()
    for row in rows:
        if row["since"] is not None and abs(row["score"]) >= LASTING and row["far_rounds"] >= 3:
            sums[row["client"]] += min(abs(row["score"]), 50.0)
    return sums.most_common(1)[0][0] if sums else None


def _slow(rows: list[dict[str, Any]]) -> tuple[str | None, str]:
    for row in rows:
        became = row["since"] is not None and row["since"] > 0
        if row["sign"] == "time.compute_virtual" and became and row["score"] >= SLOW:
            return row["client"], "slow client"
    return None, HEALTHY


def _cause(signs: dict[str, dict[str, Any]]) -> str:
    def score(name: str) -> float:
        return float(signs[name]["score"]) if name in signs and signs[name]["since"] is not None else 0.0

    if score("optimizer.learning_rate") > LASTING:
        return "learning rate too high"
    # A sign that is not among the client's strongest is as usual: the update then points where the others' do.
    cosine = float(signs["update.cosine_mean"]["newest"] or 0.0) if "update.cosine_mean" in signs else 1.0
    if score("update.norm") > LASTING and score("weight.drift") < score("update.norm") / 2 and cosine > ACROSS:
        return "scaled update"
    accuracy = signs.get("train.accuracy", {})
    guesses_badly = float(accuracy.get("newest") or 0.0) < float(accuracy.get("usual") or 0.0) - LESS
    wrong = guesses_badly or any(abs(score(name)) > LASTING for name in LABELS)
    moved = max(abs(score("update.cosine_mean")), abs(score("update.peers.cosine")), abs(score("update.peers.first")))
    if wrong:
        return "wrong labels"
    if moved > 0 and cosine < -ACROSS:
        return "flipped update"
    return "noise for an update" if moved > 0 or score("update.norm") else "wrong labels"
