# SPDX-License-Identifier: Apache-2.0
"""Two banks side by side: do the detectors behave the same on newly drawn cases trained on another device?

The other bank is read from its page's summary.json. Overlapping intervals do not prove equality, but disjoint intervals
are a difference that the random draw of runs does not explain.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvitals.errors import ConfigError
from fedvitals.report.markup import Block, Heading, Table
from fedvitals_studies.faultbank.intervals import NOTHING, Estimate
from fedvitals_studies.faultbank.report import Summary

Rows = Sequence[tuple[str, bool, Estimate, Estimate]]
"""What it is, whether it is a share in percent, here, and there."""

FIGURES = (
    *("f1", "precision", "recall", "culprit_f1", "top_1", "top_3", "delay"),
    *("alarms", "accused_clean", "accused_faulty", "cause"),
)


def read_other(path: Path) -> Mapping[str, Any]:
    """Return the facts of another page: its summary.json, or the folder that contains it."""
    file = path / "summary.json" if path.is_dir() else path
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _method(found, found["ours"])
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise ConfigError(f"{file} is no summary.json of a fault bank's page: {error}.") from error
    return found


def rows(summary: Summary, other: Mapping[str, Any], heads: Mapping[str, str], percent: frozenset[str]) -> Rows:
    """Return the figures of all runs, and F1 by domain."""
    ours = next(row for row in summary.methods if row.name == summary.ours).figures
    theirs = _method(other, summary.ours)["figures"]
    found = [(heads[name], name in percent, ours[name], _estimate(theirs.get(name))) for name in FIGURES]
    found.append(("expected calibration error", False, summary.calibration, _estimate(other.get("calibration"))))
    domains = {row["name"]: row["figures"] for row in other.get("groups", {}).get("domain", ())}
    found += [
        (f"F1, {row.name}", False, row.figures["f1"], _estimate(domains.get(row.name, {}).get("f1")))
        for row in summary.groups.get("domain", ())
    ]
    return found


def verdict(here: Estimate, there: Estimate) -> str:
    """Return whether the intervals overlap."""
    ends = (here.low, here.high, there.low, there.high)
    if any(end is None for end in ends):
        return "not known"
    low, high, their_low, their_high = (float(end) for end in ends if end is not None)
    return "apart" if low > their_high or their_low > high else "overlap"


def blocks(table: Iterator[tuple[str, ...]], here: str, there: str) -> list[Block]:
    return [
        Heading(2, "Beside another set"),
        Table(
            "Whether the detectors behave the same",
            ("figure", here, there, "95 % intervals"),
            tuple(table),
            "Other runs of the same kinds, trained on another device: where intervals lie apart, the sets differ.",
        ),
    ]


def title(banks: Sequence[str], runs: int, trained: Mapping[str, int]) -> str:
    """Return `held-out, 922 runs, on cpu`, by the device on which most were trained."""
    where = max(trained, key=lambda name: trained[name]) if trained else "cpu"
    return f"{', '.join(banks)}: {runs} runs, on {where}"


def _method(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(row for row in facts["methods"] if row["name"] == name)
    return found


def _estimate(figures: Mapping[str, Any] | None) -> Estimate:
    """Read an estimate from JSON, where an infinite delay is null with a count beside it."""
    if figures is None:
        return NOTHING
    if figures["value"] is None and figures["count"]:
        return Estimate(math.inf, figures["low"], figures["high"], figures["count"])
    return Estimate(figures["value"], figures["low"], figures["high"], figures["count"])
