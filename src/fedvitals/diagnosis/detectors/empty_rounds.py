# SPDX-License-Identifier: Apache-2.0
"""Detectors of rounds that end without a new model: nothing was aggregated, and why.

If every client failed, this is the one case; it contains what happened to each client, and no detector reports the
clients one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from fedvitals.diagnosis.evidence.attendance import (
    SERVER,
    answered_of,
    clients_of,
    events_in,
    everyone_failed,
    failed_calls,
    rounds_until,
)
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import History
from fedvitals.records import Event, Finding, Suspect
from fedvitals.stats import Array

UNCHANGED = 5  # rounds with the same model since the run began, after which a mistake in the loop is likely
LASTING = 3  # consecutive rounds without a new model, after which training has stopped
MOST_SUSPECTS = 20
WORDS = {  # for failures whose event names no exception
    "client.dropped_out": "not there",
    "client.failed": "an error",
    "update.lost": "update lost on the way",
    "update.late": "no answer in time",
    "update.refused": "update refused",
}


def no_weight(history: History, round_index: int) -> Iterator[Finding]:
    """ZERO_TOTAL_WEIGHT: all clients claim to have no samples, so that their weights sum to zero."""
    if not _claim_nothing(history, round_index):
        return
    claims = history.latest("update.samples", round_index)
    failed = bool(events_in(history, round_index, "aggregation.failed"))
    text = f"All {len(claims)} clients claim to have 0 samples."
    text += " The model stays as it was." if failed else ""
    since = _since(history, round_index) if failed else round_index
    numbers = [Number("update.samples", sum(claims.values()), of="limit")]
    yield finding(
        "ZERO_TOTAL_WEIGHT", round_index, text, confidence=1.0, since=since, severity="critical", numbers=numbers
    )


def _claim_nothing(history: History, round_index: int) -> bool:
    """Return whether every participant claims 0 samples; one client's claim does not count for the others."""
    claims = history.latest("update.samples", round_index)
    return bool(claims) and not any(claims.values()) and all(n in claims for n in clients_of(history, round_index))


def nothing_aggregated(history: History, round_index: int) -> Iterator[Finding]:
    """NOTHING_AGGREGATED: a round produced no new model, with the reason as far as it is known.

    Or the global model never changed. A note if no client failed, because then the strategy itself chose to wait.
    Critical once training has stopped: for several consecutive rounds, or from the first round on.
    """
    if not _is_empty(history, round_index):
        yield from _never_changed(history, round_index)
        return
    if _claim_nothing(history, round_index):
        return
    failed = failed_calls(history, round_index)
    reason = _reason(history, round_index)
    since = _since(history, round_index)
    rounds = rounds_until(history, round_index, LASTING)
    severity = "critical" if since <= rounds[0] else "warning"
    if not failed and not _secure_failure(history, round_index) and answered_of(history, round_index):
        severity = "note"
    share = 1 / max(len(failed), 1)
    suspects = [Suspect(node, share, _kind(event)) for node, event in [*failed.items()][:MOST_SUSPECTS]]
    yield finding(
        "NOTHING_AGGREGATED",
        round_index,
        f"Nothing was aggregated in round {round_index}, because {reason}. The model stays as it was.",
        confidence=1.0,
        since=since,
        severity=severity,
        suspects=suspects,
        more={"failed": len(failed)},
    )


def _never_changed(history: History, round_index: int) -> Iterator[Finding]:
    """Report a global model that is the same in every round so far, although clients train.

    That is how a loop behaves whose optimiser holds another model's parameters, or that never loads the average.
    """
    rounds = [past_round for past_round in history.rounds() if past_round <= round_index]
    if len(rounds) < UNCHANGED or not clients_of(history, round_index):
        return
    now, *before = (_model_sums(history, r) for r in (round_index, rounds[-2], rounds[0]))
    if not now.size or not all(np.array_equal(now, sums) for sums in before):
        return
    norms = history.latest("update.norm", round_index)
    why = "although its clients train" if any(norms.values()) else "because no client's weights change in training"
    text = f"The global model has not changed since round {rounds[0]}, {why}."
    numbers = [Number("update.norm", max(norms.values(), default=0.0), of="limit")]
    yield finding("NOTHING_AGGREGATED", round_index, text, confidence=1.0, since=rounds[0], numbers=numbers)


def _model_sums(history: History, round_index: int) -> Array:
    """Return what tells the global models of two rounds apart; empty if it was not measured."""
    nodes, values = history.across("weight", ("rms", "sum"), round_index)
    return values[[node == SERVER for node in nodes]]


def _is_empty(history: History, round_index: int) -> bool:
    """Return whether a round produced no new model."""
    return bool(events_in(history, round_index, "aggregation.failed")) or everyone_failed(history, round_index)


def _since(history: History, round_index: int) -> int:
    """Return the first of the consecutive rounds without a new model that end with this one."""
    since = round_index
    for past_round in reversed(rounds_until(history, round_index - 1)):
        if not _is_empty(history, past_round):
            break
        since = past_round
    return since


def _reason(history: History, round_index: int) -> str:
    secure = _secure_failure(history, round_index)
    if secure is not None:  # in the server's own words
        return f"secure aggregation failed: {secure.message.rstrip('.')}"
    failed, answered = failed_calls(history, round_index), answered_of(history, round_index)
    kinds = Counter(_kind(event) for event in failed.values())
    counts = ", ".join(f"{kind} ({count})" if len(kinds) > 1 else kind for kind, count in kinds.most_common())
    if everyone_failed(history, round_index):
        return f"all {len(failed)} clients failed: {counts}"
    if answered:
        some = "none failed" if not failed else f"{len(failed)} failed: {counts}"
        return f"the server made no model of {answered} answer{'s' * (answered > 1)} ({some})"
    return f"no usable update came: {counts}" if failed else "no update came, and no failure was reported"


def _kind(event: Event) -> str:
    """Return in a few words what happened to a client; only the class of an exception, see `system.failures`."""
    exception = event.data.get("exception") if event.name == "client.failed" else None
    return WORDS.get(event.name, event.name) if exception is None else str(exception)


def _secure_failure(history: History, round_index: int) -> Event | None:
    events = events_in(history, round_index, "secure_aggregation.failed")
    return next((event for event in events if event.where.node is None), None)
