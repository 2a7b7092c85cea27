# SPDX-License-Identifier: Apache-2.0
"""What fedvitals saw of a Flower deployment, read from its store, beside what the processes say themselves."""

import re
from pathlib import Path

from fedvitals.records import Event, Span
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.time_parts import CLIENT, JOURNEY, ROUND
from fedvitals.transport.sink_writer import SENDER
from support.flower.processes import SuperNode

SLOW = 300.0  # seconds that a run may take on a machine with much else to do
KINDS = ("asked", "answered", "failed", "late", "busy")


def runs_of(store: Path) -> list[str]:
    """The oldest first."""
    with open_reader(store) as reader:
        return [run.id for run in reversed(queries.list_runs(reader))]


def events_of(store: Path, run: str, *names: str) -> list[Event]:
    with open_reader(store) as reader:
        return [event for event in queries.events(reader, run) if event.name in names]


def cohorts(store: Path, run: str) -> dict[int, dict[str, set[str]]]:
    """By round that has ended: who was asked to train, who answered, …"""
    found = [event for event in events_of(store, run, "cohort") if event.data["phase"] == "train"]
    return {event.where.round or 0: {kind: set(event.data[kind]) for kind in KINDS} for event in found}


def check_trace(store: Path, run: str, nodes: list[SuperNode]) -> None:
    """Everyone that answered has a Span, which is joined to its round over that of its journey.

    Each was made in a process of its node's own, and the server names its source.
    """
    with open_reader(store) as reader:
        spans = {span.id: span for span in queries.records(reader, run, Span)}
    assert len({span.trace for span in spans.values()}) == 1
    own = [span for span in spans.values() if span.name == CLIENT]
    ended = cohorts(store, run)
    answered = [(number, node) for number, found in ended.items() for node in found["answered"]]
    assert sorted((s.where.round, s.where.node) for s in own if s.where.round in ended) == sorted(answered)
    for span in (span for span in own if span.where.round in ended):
        journey = spans[span.parent or ""]
        assert (journey.name, journey.where.node, journey.where.round) == (JOURNEY, span.where.node, span.where.round)
        whole = spans[journey.parent or ""]
        assert (whole.name, whole.where.round) == (ROUND, span.where.round)
    assert own
    for span in own:
        assert span.source.startswith(f"{SENDER}{span.where.node}/")  # set by the server, whatever the client says
    pids = [pid for node in nodes for pid in set(re.findall(r"pid (\d+)", node.log()))]
    assert len(pids) == len(set(pids)) > 0
