# SPDX-License-Identifier: Apache-2.0
"""Computes what every page shows of a run in its header and footer: state, progress, and what was measured."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedvitals import __version__
from fedvitals.catalog import LEVELS
from fedvitals.plain_json import copied, finite
from fedvitals.records import Run
from fedvitals.store.read import queries
from fedvitals.store.read.metrics import EMPTY_SERIES, series_arrays
from fedvitals.store.read.presence import is_written, writers
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import count_runs, last_records_of_open_runs, run_heads, span_of_rounds
from fedvitals.views.card import percent_of, setting_of
from fedvitals.views.cases import cases_of
from fedvitals.views.outline import FamilyKnown, Known, known_families, known_metric
from fedvitals.views.traffic_counts import traffic_total

LAB_ROUNDS = 10  # for an experiment that does not set it
RunState = Literal["running", "silent", "died", "finished"]
# Seconds without a record; a live run records a heartbeat every ten. «silent»: a process that may write to it exists,
# but it or its machine is suspended. «died»: there is none, as far as is visible from here.
SILENT, DIED = 60.0, 45.0


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The store that is shown."""

    store: str
    fedvitals: str
    runs: int


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run."""

    id: str
    name: str
    state: RunState
    host: str
    topology: str | None
    seed: int | None
    started: float | None
    finished: float | None
    seconds: float | None
    last_record: float | None
    rounds: int
    rounds_planned: int | None
    first_round: int | None
    last_round: int | None
    clients: int
    accuracy: float | None
    loss: float | None
    round_seconds: float | None  # of the newest round
    bytes: int | None  # of the training, transferred so far
    telemetry_bytes: int | None  # fedvitals' own, in addition
    findings: int
    lost: int
    thinned: int  # client-rounds whose layer statistics were omitted
    cost_percent: float | None  # of measuring, relative to the rounds' time
    probes: str  # the preset that measured, as chosen: «standard»; empty if unknown
    privacy: str
    metrics: tuple[Known, ...]
    families: tuple[FamilyKnown, ...]
    config: Mapping[str, Any]
    versions: Mapping[str, str]


def store_status(reader: Reader, shown: str) -> StoreStatus:
    """Read the state of the store; `shown`: its name for users."""
    return StoreStatus(shown, __version__, count_runs(reader))


def status_of(reader: Reader, run: str, *, now: float | None = None) -> Status:
    """Read the state of a run."""
    described, summary = queries.get_run(reader, run), queries.summary_of(reader, run)
    rounds = span_of_rounds(reader, run)
    last_record = finite(rounds.last_record)
    series = series_arrays(reader, run, ("time.round", "monitor.cost"), (None,))
    times, costs = (series.get((name, None), EMPTY_SERIES)[1] for name in ("time.round", "monitor.cost"))
    level, sent = privacy_level(described), traffic_total(reader, run)
    return copied(
        Status,
        described,
        summary,
        state=state_of(described.finished, last_record, described.started, written=is_written(reader, run), now=now),
        started=finite(described.started),
        last_record=last_record,
        rounds=rounds.count,
        rounds_planned=planned_rounds(described),
        first_round=rounds.first,
        last_round=rounds.last,
        findings=len(cases_of(reader, run)),
        accuracy=finite(summary.accuracy),
        loss=finite(summary.loss),
        round_seconds=finite(float(times[-1])) if len(times) else None,
        bytes=None if sent is None else sent.bytes,
        telemetry_bytes=None if sent is None else sent.telemetry,
        cost_percent=percent_of(costs, times),
        probes=str(setting_of(described, "probes", "")),
        privacy=f"{level}: {LEVELS[level]}",
        metrics=tuple(known_metric(name) for name in queries.metric_names(reader, run)),
        families=tuple(known_families(reader, run)),
    )


def state_of(
    finished: float | None,
    last_record: float | None,
    started: float | None = None,
    *,
    written: bool = False,
    now: float | None = None,
) -> RunState:
    """Return a run's state; `written`: whether a process exists that may still write to it."""
    if finished is not None:
        return "finished"
    heard = started if last_record is None else last_record
    quiet = 0.0 if heard is None else (time.time() if now is None else now) - heard
    if written:
        return "silent" if quiet > SILENT else "running"
    return "died" if quiet > DIED else "running"


def run_states(reader: Reader, now: float | None = None) -> dict[str, RunState]:
    """Return the state of each run of the store, by its id."""
    heads, last = [*run_heads(reader)], last_records_of_open_runs(reader)
    newest = max((run.started or 0.0 for run in heads if run.finished is None), default=None)
    written = writers(reader)
    return {
        run.id: state_of(
            run.finished,
            last.get(run.number),
            run.started,
            written=run.finished is None and written(run.id, (run.started or 0.0) == newest),
            now=now,
        )
        for run in heads
    }


def planned_rounds(run: Run) -> int | None:
    """Return the planned number of rounds, if the host or the user has set it."""
    for name in ("rounds", "num_rounds", "num_server_rounds"):
        planned = run.config.get(name)
        if isinstance(planned, int) and not isinstance(planned, bool) and planned > 0:
            return planned
    experiment = run.config.get("experiment")
    if run.host == "lab" and isinstance(experiment, str):
        # Defaults are not written; a table after it may have its own rounds.
        written = re.search(r"^rounds = (\d+)$", experiment.partition("\n[")[0], re.MULTILINE)
        return int(written[1]) if written else LAB_ROUNDS
    return None


def privacy_level(run: Run) -> int:
    """Return the privacy level that the run's monitor was set to."""
    level = setting_of(run, "privacy", 3)
    return level if isinstance(level, int) and 0 <= level < len(LEVELS) else 3
