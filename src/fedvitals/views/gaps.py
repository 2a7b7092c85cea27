# SPDX-License-Identifier: Apache-2.0
"""Reports what detectors examined in a stored run, what of it was not judged, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedvitals.diagnosis.abstentions import LOOKED_AT, NEWEST, NOT_JUDGED, SHARE, Examined
from fedvitals.diagnosis.gaps import (
    DETECTOR,
    MONITOR_ERROR,
    OUTSIDE_ROUND,
    SINK_LOST,
    UNSEEN,
    MonitorFailure,
    gaps,
    monitor_failure_of,
)
from fedvitals.records import Event
from fedvitals.store import spill_folder
from fedvitals.store.read import queries
from fedvitals.store.read.examined import ExaminationRecords, examination_records
from fedvitals.store.read.nodes import count_clients
from fedvitals.store.read.reader import Reader
from fedvitals.transport.spill import waiting_runs

LIVE = (DETECTOR, "taking a finding")  # failures of the detectors that examined the run live


@dataclass(frozen=True, slots=True)
class Examination:
    """What detectors examined (None: not recorded), and why that is not everything; empty if it is."""

    examined: Examined | None
    gaps: tuple[str, ...]


def examination_of(
    reader: Reader,
    run: str,
    again: Sequence[MonitorFailure] | None = None,
    *,
    examined: Examined | None = None,
    clients: int | None = None,
) -> Examination:
    """Return what detectors examined in a run, and why it was not fully examined.

    `again`: failures of detectors that examined the store again, replacing the failures of the live ones. What could
    not be measured or recorded is missing then as well; `examined` is what they examined. `clients`: the run's number
    of clients, if known already.
    """
    stored = examination_records(reader, run, "diagnosis.", SHARE, NEWEST)
    if again is None:
        examined = _examined(stored, count_clients(reader, run) if clients is None else clients)
    names = (MONITOR_ERROR, queries.TELEMETRY_LOST, SINK_LOST, OUTSIDE_ROUND, UNSEEN)
    warnings = queries.warnings_of(reader, run, names)
    errors = [event for event in warnings if event.name == MONITOR_ERROR]
    failures = [failure for event in errors if (failure := monitor_failure_of(event)) is not None]
    if again is not None:
        failures = [*again, *(failure for failure in failures if not failure.doing.startswith(LIVE))]
    reasons = gaps(
        failures,
        *queries.left_out(reader, run, warnings, stored.lost),
        examined=examined,
        sinks={} if again is not None else _lost_by_sink(warnings),
        outside={*stored.outside, *_nodes_of(warnings, OUTSIDE_ROUND)},
        unseen=any(event.name == UNSEEN for event in warnings),
    )
    if reader.database.dialect.name == "sqlite" and run in waiting_runs(spill_folder(reader.database.target)):
        reasons = (*reasons, "some of its records wait beside the store (`fedvitals doctor --mend` takes them back)")
    return Examination(examined, reasons)


def gaps_of(reader: Reader, run: str) -> tuple[str, ...]:
    """Return why a run was not fully examined; empty if it was."""
    return examination_of(reader, run).gaps


def _examined(stored: ExaminationRecords, clients: int) -> Examined | None:
    if LOOKED_AT not in stored.sums:
        return None
    total, first, last = stored.sums[LOOKED_AT]
    counts = {rule: int(stored.sums.get(f"{SHARE}.{rule}", (0.0, 0, 0))[0]) for rule in NOT_JUDGED}
    return Examined(
        clients=clients,
        first=first,
        last=last,
        client_rounds=int(total),
        not_judged={rule: count for rule, count in counts.items() if count},
        newest_judged=not stored.newest or any(share < 1 for share in stored.newest),
    )


def _nodes_of(warnings: Sequence[Event], name: str) -> set[str]:
    return {event.where.node for event in warnings if event.name == name and event.where.node is not None}


def _lost_by_sink(warnings: Sequence[Event]) -> dict[str, int]:
    """Return how many records each sink beside the store has lost, as last reported."""
    lost: dict[str, int] = {}
    for event in warnings:
        sink, records = event.data.get("sink"), event.data.get("records")
        if event.name == SINK_LOST and event.where.node is None and isinstance(sink, str) and isinstance(records, int):
            lost[sink] = records
    return lost
