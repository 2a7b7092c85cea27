# SPDX-License-Identifier: Apache-2.0
"""Remedies for a run's bottleneck, ranked by the gain computed for this run and by what it costs.

Each comes from a row of the what-if table. Where the lab can re-run it, it carries the change of the experiment as
data: dotted names of fields, as `lab.read(text, changes)` takes them, and their values. A value relative to the present
one is `{"times": 0.5}`, which `resolve_change` computes. `{"faster": 4}` means the same device that many times as fast,
and `{"loading": 4}` devices that load data that many times as fast: both need the lab's profiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedvitals.analysis.bottleneck import STRAGGLER, RunVerdict
from fedvitals.analysis.critical_path import format_seconds
from fedvitals.analysis.what_if import WhatIfRow
from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.plain_json import copied

LEAST = 0.02  # share of a round below which a remedy is not worth its costs
ENOUGH = 0.8  # of the largest saving by a deadline: among those that reach it, the one that excludes the fewest
MOST_LOST = 0.5  # share of the data; nobody would set a deadline that excludes more
TOO_MUCH = 0.25  # share of the data; a remedy that excludes more comes last, and is no advice by itself
# The share of each kind's gain that counts when remedies are ranked; the rest is the cost in learning.
WORTH = {
    "loading_workers": 1.0,
    "evaluate_every": 1.0,
    "without": 0.9,
    "aggregate": 0.9,
    "server": 0.9,
    "batch": 0.8,
    "compress": 0.8,
    "compress_download": 0.8,
    "over_select": 0.6,
    "asynchronous": 0.6,
    "deadline": 0.6,
    "steps": 0.5,
    "cohort": 0.5,
}
SPARSE = 0.7  # likewise, for updates most of which is not sent


@dataclass(frozen=True, slots=True)
class Remedy:
    """One remedy with its gain for this run: seconds of a round before and after, and their difference."""

    key: dict[str, Any]
    name: str
    why: str
    before: float
    after: float
    saving: float
    share: float
    costs: str
    assumes: str
    change: dict[str, Any] | None  # to an experiment; None: the lab cannot run it
    rounds_factor: float = (
        1.0  # so many times as many rounds bring as many updates, where a round becomes another thing
    )
    at_most: bool = False  # the gain is at most this, and perhaps less


NAMES = {
    "compress": "Compress updates to 1/{}",
    "compress_download": "Compress the model that is sent out to 1/{}",
    "steps": "Train half as many local steps or epochs",
    "batch": "Make batches {} times as large",
    "loading_workers": "Load data with {} workers",
    "evaluate_every": "Evaluate every {} rounds only",
    "aggregate": "Make the aggregation {} times as fast",
    "server": "Give the server a device {} times as fast",
    "cohort": "Ask half as many clients",
    "deadline": "Close each round after {}",
    "over_select": "Ask {} times as many clients as are needed, and take the first",
    "asynchronous": "Aggregate asynchronously, {} updates at a time",
}
HELPS = {  # the bound that each works against: a remedy for what bounds the run is marked
    "compress": ("upload",),
    "compress_download": ("download",),
    "steps": ("compute", "data loading"),
    "batch": ("compute",),
    "loading_workers": ("data loading",),
    "evaluate_every": ("server",),
    "aggregate": ("aggregation",),
    "server": ("server", "aggregation"),
    "cohort": (STRAGGLER, "download", "aggregation"),
    "deadline": (STRAGGLER,),
    "over_select": (STRAGGLER,),
    "asynchronous": (STRAGGLER,),
    "without": (STRAGGLER,),
}


def remedies(verdict: RunVerdict, rows: Sequence[WhatIfRow], *, least: float = LEAST) -> list[Remedy]:
    """Return the remedies that save at least a share `least` of a round, best gain for the cost first.

    A remedy that excludes a quarter of the data comes last, and is only returned together with others.
    """
    selected = [row for row in by_worth(_select_rows(rows)) if row.share >= least]
    applicable = [(_rank(row), _remedy(row, verdict)) for row in selected]
    if verdict.kind == STRAGGLER and verdict.without is not None:
        mended = _without(verdict, verdict.without)
        applicable.append(((False, -WORTH["without"] * mended.share), mended))
    applicable.sort(key=lambda entry: entry[0])
    return [remedy for _, remedy in applicable] if any(not rank[0] for rank, _ in applicable) else []


def by_worth(rows: Sequence[WhatIfRow]) -> list[WhatIfRow]:
    """Return the rows of a what-if table, best gain for the cost first; rows that exclude much data last."""
    return sorted(rows, key=_rank)


def _rank(row: WhatIfRow) -> tuple[bool, float]:
    lost = row.lost or 0.0
    worth = SPARSE if row.key == {"compress": 16} else WORTH[_kind(row)]
    return lost > TOO_MUCH, -row.share * worth * (1 - lost)


def _select_rows(rows: Sequence[WhatIfRow]) -> list[WhatIfRow]:
    """Return all rows, but only one deadline, one over-selection and the most useful evaluation interval."""
    chosen = [row for row in rows if _kind(row) not in ("deadline", "over_select") and row.key != {"evaluate_every": 0}]
    for sort in ("deadline", "over_select"):
        same = [row for row in rows if _kind(row) == sort and row.saving > 0 and (row.lost or 0.0) <= MOST_LOST]
        if same:
            most = max(row.saving for row in same)
            chosen.append(min((r for r in same if r.saving >= ENOUGH * most), key=lambda r: (r.lost or 0.0, -r.saving)))
    return chosen


def _kind(row: WhatIfRow) -> str:
    return next(iter(row.key))


def _remedy(row: WhatIfRow, verdict: RunVerdict) -> Remedy:
    sort = _kind(row)
    name = NAMES[sort].format(format_seconds(row.key[sort]) if sort == "deadline" else row.key[sort])
    if row.key == {"compress": 4}:
        name = "Quantise updates to 8 bits"
    elif sort == "compress":
        name = f"Send only the largest changes, 1/{row.key[sort]} of the bytes"
    change, factor = _change(sort, row)
    fits = verdict.kind in HELPS[sort] or (verdict.kind == STRAGGLER and verdict.bound_by in HELPS[sort])
    why = f"The run is {verdict.kind.replace(' ', '-')}-bound." if fits else "It shortens the critical path."
    return copied(Remedy, row, name=name, why=why, change=change, rounds_factor=factor)


def _without(verdict: RunVerdict, after: float) -> Remedy:
    slow = verdict.stragglers
    names = ", ".join(slow[:3]) + (f" and {len(slow) - 3} more" if len(slow) > 3 else "")
    saving = verdict.seconds - after
    why = f"Slow in {verdict.bound_by}." if verdict.bound_by else "The run is straggler-bound."
    assumes = "The others' times stay as they are."
    costs = (
        f"A faster machine or link; {'its data, if it is' if len(slow) == 1 else 'their data, if they are'} left out."
    )
    name = ISSUES_BY_CODE["STRAGGLER"].remedies[0].rstrip(".").replace("the client", names)
    name = name if len(slow) == 1 else name.replace("leave it", "leave them")
    share = saving / verdict.seconds
    key = {"without": [*slow]}
    return Remedy(key, name, why, verdict.seconds, after, saving, share, costs, assumes, None)


def _change(sort: str, row: WhatIfRow) -> tuple[dict[str, Any] | None, float]:
    """Return the change of the experiment, and the factor by which more rounds bring as many updates."""
    value = row.key[sort]
    half = {"times": value}
    if sort == "compress":
        return {"compression": {"kind": "int8"} if value == 4 else {"kind": "top_k", "share": 0.5 / value}}, 1.0
    if sort == "asynchronous":
        cohort = row.key["concurrency"]
        return {"topology": {"kind": "asynchronous", "buffer": value, "concurrency": cohort}}, cohort / value
    if sort == "over_select":
        fewer = {"participation": {"times": 1 / value}} if row.key["all_asked"] else {}
        return {**fewer, "network.over_selection": value}, 1.0
    changes: dict[str, dict[str, Any]] = {
        "steps": {"local.epochs": half, "local.iterations": half},
        "batch": {"local.batch": half},
        "cohort": {"participation": half},
        "deadline": {"network.deadline_seconds": value},
        "evaluate_every": {"evaluation.every": value},
        "server": {"network.server": {"faster": value}},
        "loading_workers": {"network.devices": {"loading": value}},
    }
    return changes.get(sort), 1.0


def resolve_change(change: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return the change with `{"times": ...}` replaced by values, computed from an experiment as a (nested) table.

    Settings that the experiment does not have stay unset; integers stay integers, and at least 1.
    """
    values: dict[str, Any] = {}
    for name, value in change.items():
        if not (isinstance(value, Mapping) and set(value) == {"times"}):
            values[name] = value
            continue
        present: Any = current
        for key in name.split("."):
            present = present.get(key) if isinstance(present, Mapping) else None
        if isinstance(present, int) and not isinstance(present, bool) and name != "participation":
            values[name] = max(1, round(present * value["times"]))
        elif isinstance(present, int | float):
            values[name] = present * value["times"]
    return values
