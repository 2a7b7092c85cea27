# SPDX-License-Identifier: Apache-2.0
"""The privacy gate: what may leave a client. `released` is called once, where a record leaves a client's scope.

| level | may leave a client |
| --- | --- |
| 0 | timings, bytes, counts, liveness, error class |
| 1 | also sums over at least k clients, where there is someone to sum; elsewhere as 0 |
| 2 | also scalars of one client: loss, norms, sample count, what the user logs |
| 3 | also statistics of layers, histograms, sketches, labels; a client's words; tracebacks by a switch of their own |
| 4 | also tensors on the tape |

`catalog` says which level a metric or family needs. In doubt a record counts as a client's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedvitals.catalog import (
    SKETCH_LEVEL,
    from_update,
    is_update_family,
    is_update_metric,
    level_of,
    level_of_metric,
)
from fedvitals.errors import ConfigError
from fedvitals.measurements import Emitted, Measurements, Transfers
from fedvitals.records import Action, Event, Finding, LayerStats, Metric, Record, Run, Sketch, Span, Transfer, Truth
from fedvitals.stats import (
    CLASS_COLUMNS,
    COUNT,
    FAMILIES,
    HEALTH_COLUMNS,
    HISTOGRAM_COLUMNS,
    INFS,
    LENGTH_COLUMNS,
    NANS,
    STATISTICS,
    STEP_COLUMNS,
    SUM,
    SUM_MAGNITUDES,
    SUM_SQUARES,
    TOKEN_COLUMNS,
    ZEROS,
)

LEAST_CLIENTS = 10  # the fewest clients whose sum may be reported from level 1 on
SUMS, SCALARS, WORDS = 1, 2, 3  # levels
SERVER = (None, "server")
TRUSTED_HOSTS = ("torch", "lab")  # everything runs in one process of the user; any other host is a deployment

# Columns of a family that add up. The others, a smallest or largest value, belong to one client, and no sum hides them.
ADDING: Mapping[tuple[str, ...], Iterable[int]] = {
    STATISTICS: (COUNT, SUM, SUM_SQUARES, SUM_MAGNITUDES, ZEROS, NANS, INFS),
    STEP_COLUMNS: (0, 1),
    HISTOGRAM_COLUMNS: range(len(HISTOGRAM_COLUMNS)),
    HEALTH_COLUMNS: range(len(HEALTH_COLUMNS)),
    **{columns: range(len(columns)) for columns in (CLASS_COLUMNS, TOKEN_COLUMNS, LENGTH_COLUMNS)},
}

DATA_SCALARS = (
    *(
        "mean",
        "std",
        "std_error",
        "missing",
        "constant",
        "duplicates",
        "length",
        "out_of_range",
        "within_classes",
        "explained",
    ),
)
# The fields of an event that remain without its words. Only our own code can write these keys: see `logs`, `timing`.
LEFT: Mapping[str, tuple[str, ...]] = {
    "log": ("logger", "exception"),
    "exception": ("block", "error", "trace", "span"),
    "monitor.error": ("doing", "exception"),
    "probe.abstains": ("doing",),
    "client.failed": ("exception", "errno", "code", "phase", "round"),
    "client.dropped_out": ("exception", "code", "phase", "round"),
    "edge.failed": ("exception", "errno"),
    "round.failed": ("exception", "errno"),
    # Without class means and single values, which are level 3, and checksums, which could identify the data.
    # What changed since the last description is determined by the client itself.
    "data": ("samples", "features", "looks", "change", "moved", "classes_lost", *DATA_SCALARS),
}
# Times and counts, and nothing of a client's own, since `timed` does not let users set these keys.
LEFT_OF_SPANS = (
    "error", "failed", "parts", "folded", "clock", "steps", "clock_offset", "clock_error", "waited_for", "late", "lost",
    "deadline",
)  # fmt: skip
WRITTEN_BY_TIMED = (*LEFT_OF_SPANS, "message")
OUR_WORDS = (  # events that quote no one
    "budget", "client.answered_late", "client.busy", "client.clock", "client.connected", "client.disconnected",
    "client.joined", "client.left", "client.outside_round", "client.partition", "client.unserved", "data.new",
    "interrupted", "round.stalled", "round.unclosed", "season", "telemetry.lost", "telemetry.refused",
    "telemetry.thinned", "update.base", "update.late", "update.left_out", "update.refused", "updates.approximate",
    "worker.lost", "worker.thinned",
)  # fmt: skip
PASSING_ON = ("exception", "edge.failed", "round.failed")  # what the server catches may have been raised by a client
ERROR_REPLY = re.compile(r"(<class '[^']*'>):<'.*'>", re.DOTALL)  # the class and the text of a client's exception
SERVER_CODE = {"raised_by": "server"}  # in the data of such an event: raised by code that runs no client
TROUBLE = ("warning", "error", "critical")
FREE = (Run, Transfer, Finding, Action, Truth)
OPEN = frozenset({Metric, LayerStats, Span, Sketch, Transfer})  # from level 3 on; spares most records the rest


@dataclass(frozen=True, slots=True)
class PrivacyPolicy:
    """The privacy settings of a run, which are sent to every process that makes records."""

    level: int = 3
    cohort: int = LEAST_CLIENTS
    tracebacks: bool = True
    hides: bool = False  # the federation hides its clients: what a server could compute about one is not stored


def policy_for(
    host: str, level: int | None = None, cohort: int = LEAST_CLIENTS, tracebacks: bool | None = None
) -> PrivacyPolicy:
    """Return the policy of a run: the user's, else level 3 with tracebacks locally, and 2 without in a deployment."""
    at_home = host in TRUSTED_HOSTS
    if level is None:  # asking for tracebacks implies asking for words
        level = 3 if at_home or tracebacks else 2
    if isinstance(level, bool) or level not in range(5):
        raise ConfigError(f"privacy= is a level from 0 to 4, got {level!r}. See docs/metrics.md, «Privacy».")
    if isinstance(cohort, bool) or not isinstance(cohort, int) or cohort < 2:
        raise ConfigError(f"cohort= is the least number of clients in a sum, 2 or more; got {cohort!r}.")
    return PrivacyPolicy(level, cohort, at_home if tracebacks is None else bool(tracebacks))


def described_policy(policy: PrivacyPolicy) -> dict[str, Any]:
    """Return the policy as it is stored in the run's config."""
    settings = {"privacy": policy.level, "cohort": policy.cohort, "tracebacks": policy.tracebacks}
    return settings | ({"hides": True} if policy.hides else {})


def released(
    record: Emitted, policy: PrivacyPolicy, *, clients: int | None = None, stray: bool = False, held: bool = False
) -> Emitted | None:
    """Return as much of a record as may leave: the record, a copy with less in it, or None.

    `clients`: how many clients a sum covers (None: it is not a sum). `stray`: it says «server», but a client's code may
    have made it. `held`: the recipient holds the clients' updates themselves. What a server computes from updates that
    it received anyway is not telemetry, and keeping it out of the store would protect nobody.
    """
    if isinstance(record, Measurements):
        return _measurements(record, policy, stray=stray, held=held)
    if isinstance(record, Transfers):
        return record  # treated like each of its records, see FREE
    return _record(record, policy, clients=clients, stray=stray, held=held)


def _record(record: Record, policy: PrivacyPolicy, *, clients: int | None, stray: bool, held: bool) -> Record | None:
    # Findings and actions derive from what was already released, and a lab's planted faults are not a client's.
    if (policy.level >= WORDS and type(record) in OPEN) or isinstance(record, FREE):
        return record
    # Edges count as clients: they are sites of their own, and names alone do not distinguish them.
    about_client = stray or record.where.node not in SERVER
    if isinstance(record, Event):
        return _event(record, policy, about_client=about_client)
    if isinstance(record, Span):
        return _span(record, policy, about_client=about_client)
    if policy.level >= level_of(record) or (held and not policy.hides and from_update(record)):
        return record
    if clients is not None:
        return _adding(record) if policy.level >= SUMS and clients >= policy.cohort else None
    return None if about_client else record


def _measurements(table: Measurements, policy: PrivacyPolicy, *, stray: bool, held: bool) -> Measurements | None:
    """Return the values, matrices and sketches that may leave, column by column, without names of the others."""
    if policy.level >= WORDS:
        return table if len(table) else None

    def may_leave(level: int, *, of_update: bool) -> bool:
        return policy.level >= level or (held and not policy.hides and of_update)

    free = np.array([not stray and node in SERVER for node in table.nodes], np.bool_)
    columns = [may_leave(level_of_metric(name), of_update=is_update_metric(name)) for name in table.names]
    layers = []
    for part in table.layers:
        leaves = may_leave(FAMILIES[part.family].level, of_update=is_update_family(part.family))
        kept = [i for i, row in enumerate(part.rows) if leaves or free[row]]
        if kept:
            layers.append(replace(part, rows=tuple(part.rows[i] for i in kept), matrices=part.matrices[kept]))
    leaves = may_leave(SKETCH_LEVEL, of_update=True)
    kept = [i for i, row in enumerate(table.sketch_rows) if leaves or free[row]]
    passed = replace(
        table,
        present=table.present & (np.array(columns, np.bool_)[None] | free[:, None]),
        layers=tuple(layers),
        sketch_rows=tuple(table.sketch_rows[i] for i in kept),
        sketches=table.sketches[kept] if kept and table.sketches is not None else None,
    )
    return passed.without_absent() if len(passed) else None


def _event(record: Event, policy: PrivacyPolicy, *, about_client: bool) -> Event | None:
    data = record.data
    if policy.level >= WORDS:
        return record if policy.tracebacks or "traceback" not in data else _without(record, ("traceback",))
    if not about_client and (record.name not in PASSING_ON or SERVER_CODE.items() <= data.items()):
        return _of_server(record)
    if record.name in OUR_WORDS:
        return record
    if level_of(record) > policy.level or (record.name == "log" and record.level not in TROUBLE):
        return None
    left = {key: data[key] for key in LEFT.get(record.name, ()) if key in data}
    named = [str(left[key]) for key in ("doing", "block", "logger", "exception", "error") if key in left]
    message = f"{': '.join(named) or record.name} (its words need privacy level {WORDS})"
    return replace(record, message=message, data=left)


def _of_server(record: Event) -> Event:
    """Return a server's event with its own words, but never those of a logged exception, which may stem from a client.

    A client's error reply may be quoted in any text, in Flower's format.
    """
    if record.name == "log":
        record = _without(record, ("traceback", "exception_message"))
        if record.data.get("quotes") is True:
            named = [str(record.data[key]) for key in ("logger", "exception") if key in record.data]
            return replace(record, message=f"{': '.join(named)} (its words need privacy level {WORDS})")
    if "<class '" not in record.message:
        return record
    return replace(record, message=ERROR_REPLY.sub(r"\1", record.message))


def _span(record: Span, policy: PrivacyPolicy, *, about_client: bool) -> Span:
    attributes = record.attributes
    if policy.level >= WORDS or not attributes:
        return record
    if about_client:
        return replace(record, attributes={key: attributes[key] for key in LEFT_OF_SPANS if key in attributes})
    return record if "message" not in attributes else replace(record, attributes=_less(attributes, ("message",)))


def _adding(record: Record) -> Record | None:
    """Return the part of a sum over clients that adds up."""
    if isinstance(record, LayerStats):
        matrix = np.full_like(record.matrix, np.nan)
        columns = list(ADDING.get(FAMILIES[record.family].columns, ()))
        matrix[:, columns] = record.matrix[:, columns]
        return replace(record, matrix=matrix)
    return record if isinstance(record, Metric) else None


def _without(event: Event, keys: tuple[str, ...]) -> Event:
    return replace(event, data=_less(event.data, keys)) if any(key in event.data for key in keys) else event


def _less(fields: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in keys}
