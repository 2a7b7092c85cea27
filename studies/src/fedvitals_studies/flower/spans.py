# SPDX-License-Identifier: Apache-2.0
"""Checks that the Spans of Flower's clients belong to their round: one chain from each client's to the round's."""

from __future__ import annotations

from fedvitals.records import Event, Span
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.time_parts import CLIENT, JOURNEY, ROUND

COHORT = "cohort"  # the event with the clients that were asked, and those that answered
TRAIN = "train"


def spans_joined(reader: Reader, run: str) -> tuple[int, int, tuple[str, ...]]:
    """Return how many answered when asked to train, how many of their Spans are joined, and which are not."""
    spans = {span.id: span for span in queries.records(reader, run, Span)}
    joined = {
        (span.where.node, round_span.where.round)
        for span in spans.values()
        if span.name == CLIENT and (round_span := _round_above(span, spans)) is not None
    }
    answered = []
    for event in queries.records(reader, run, Event):
        if event.name == COHORT and event.data.get("phase") == TRAIN:
            answered += [(str(node), event.where.round) for node in event.data.get("answered", ())]
    missing = tuple(f"{node} in round {number}" for node, number in answered if (node, number) not in joined)
    return len(answered), len(answered) - len(missing), missing


def _round_above(span: Span, spans: dict[str, Span]) -> Span | None:
    """Return the round above a client's Span and its journey, all in one trace; None if there is none."""
    journey = spans.get(span.parent or "")
    if journey is None or journey.name != JOURNEY or journey.where.node != span.where.node:
        return None
    above = spans.get(journey.parent or "")
    if above is None or above.name != ROUND:
        return None
    return above if span.trace == journey.trace == above.trace else None
