# SPDX-License-Identifier: Apache-2.0
"""Replay against its bars: exactness, cost and size, time to reach any round, and accuracy of bisect."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedvitals.replay.player.proof import TOLERANCE
from fedvitals_studies.bench.replay.bisect import planted, tried
from fedvitals_studies.bench.replay.cost import WORKLOADS, measured
from fedvitals_studies.bench.replay.machines import apart
from fedvitals_studies.bench.replay.proof import proved, runs
from fedvitals_studies.bench.replay.tape import EVERY, jumps, recorded, size_of

Row = dict[str, Any]
Tell = Callable[[str], None]

PARTS = ("verified", "machines", "recording", "size", "jump", "bisect")
BAR_TRAINING, BAR_AGGREGATION, BAR_SIZE = 1.5, 8.0, 3.0  # per cent
BAR_JUMP = 1.0  # seconds
FEDDEBUG = 48.0  # per cent of aggregation, as in its paper


def bench_replay(*, quick: bool = False, tell: Tell = lambda _: None, only: Collection[str] = ()) -> list[Row]:
    """Return a row for each bar, `details` with the single cases. `only`: some of PARTS."""
    parts = [part for part in PARTS if not only or part in only]
    rows: list[Row] = []
    with TemporaryDirectory(prefix="fv") as made:
        folder = Path(made)
        if "verified" in parts:
            rows.append(_verified(folder, quick, tell))
        if "machines" in parts:
            rows.append(_machines(folder, tell))
        if "recording" in parts:
            for workload in WORKLOADS:
                rows += _recording(workload, folder, quick, tell)
        if "size" in parts or "jump" in parts:
            rows += _taped(folder, parts, quick, tell)
        if "bisect" in parts:
            rows += _bisected(folder, quick, tell)
    return rows


def _row(what: str, bar: str, measured: str, verdict: str, details: Any = (), **numbers: float) -> Row:
    return {"what": what, "bar": bar, "measured": measured, "verdict": verdict, **numbers, "details": details}


def _met(met: bool) -> str:
    return "met" if met else "missed"


# -- whether it is exact ----------------------------------------------------------------------------------------------


def _verified(folder: Path, quick: bool, tell: Tell) -> Row:
    found = proved(runs(quick=quick), folder / "verified", tell)
    rounds, exact = sum(one["rounds"] for one in found), sum(one["exact"] for one in found)
    said = f"{exact} of {rounds} rounds, of {len(found)} runs, in {sum(one['seconds'] for one in found):.0f} s"
    wrong = [one["mismatch"] for one in found if one["mismatch"]]
    said += f"; {wrong[0]}" if wrong else ""
    what = "rounds that are the same to the last bit, executed again from the seed"
    return _row(what, "100 %", said, _met(exact == rounds > 0 and not wrong), found, value=100 * exact / max(1, rounds))


def _machines(folder: Path, tell: Tell) -> Row:
    found = apart(folder / "machines", tell)
    worst = max(one["one_round"] for one in found)
    said = "; ".join(f"{one['model']}, {one['machines']}: {one['one_round']:.0e}" for one in found)
    what = "where bits cannot be the same: a layer's norm after one round, relative to the model's"
    return _row(what, f"≤ {TOLERANCE:g}, stated", said, _met(worst <= TOLERANCE), found, value=worst)


# -- what it costs ----------------------------------------------------------------------------------------------------


def _recording(workload: str, folder: Path, quick: bool, tell: Tell) -> list[Row]:
    found = measured(workload, folder / f"cost-{workload}", quick=quick, tell=tell)
    feddebug, thread = found["every model"], found["thread_percent"]
    rows = []
    for what, key, bar, unit in (
        ("training", "wall", BAR_TRAINING, "round_seconds"),
        ("training's processor time", "cpu", BAR_TRAINING, "round_cpu_seconds"),
        ("aggregation", "own", BAR_AGGREGATION, "aggregation_seconds"),
        ("aggregation's processor time", "own_cpu", BAR_AGGREGATION, "aggregation_cpu_seconds"),
    ):
        value, low, high = (found["tape"][key][name] for name in ("overhead_percent", "low", "high"))
        said = f"{value:.2f} % ({low:.2f} to {high:.2f}) of {1000 * found[unit]:.0f} ms, {found['pairs']} pairs"
        said += f"; the tape's thread alone {thread:.2f} %" if key == "cpu" else ""
        said += f"; every model saved at once: {feddebug[key]['overhead_percent']:.1f} %"
        said += f" (FedDebug's paper: {FEDDEBUG:g} %)" if key == "own" else ""
        # An interval on both sides of the bar decides nothing, whatever its middle.
        verdict = _met(value <= bar) if high <= bar or low > bar else "open"
        title = f"recording over not recording, {what}, {workload}"
        rows.append(_row(title, f"≤ {bar:g} %", said, verdict, found, value=value, low=low, high=high))
    return rows


# -- what it keeps, and how soon it is anywhere -----------------------------------------------------------------------


def _taped(folder: Path, parts: Collection[str], quick: bool, tell: Tell) -> list[Row]:
    run = recorded(folder / "tape", quick=quick, tell=tell)
    rows = []
    if "size" in parts:
        found = size_of(run)
        said = f"{found['percent']:.2f} %: {found['bytes']:,} of {found['whole_bytes']:,} bytes; {found['said']}"
        met = found["percent"] <= BAR_SIZE and found["complete"]
        what = f"tape of {found['clients']} clients × {found['rounds']} rounds of the paper's CNN, all replayable"
        rows.append(_row(what, f"≤ {BAR_SIZE:g} %", said, _met(met), found, value=found["percent"]))
    if "jump" in parts:
        jumped = jumps(run, 3 if quick else 12, tell)
        worst, most = (max(one[name] for one in jumped["jumps"]) for name in ("beside", "rerun"))
        exact = sum(one["exact"] for one in jumped["jumps"])
        said = f"{worst:.2f} s, and at most {most} rounds run again; {exact} of {len(jumped['jumps'])} exact"
        said += f"; to open the tape {jumped['opening']:.2f} s"
        met = worst <= BAR_JUMP and most <= EVERY and exact == len(jumped["jumps"])
        what = f"jump to any round, beside running at most {EVERY} again"
        rows.append(_row(what, f"≤ {BAR_JUMP:g} s", said, _met(met), jumped, value=worst))
    return rows


# -- whom it convicts -------------------------------------------------------------------------------------------------


def _bisected(folder: Path, quick: bool, tell: Tell) -> list[Row]:
    cases = planted()[:2] if quick else planted()
    found = tried(cases, folder / "bisect", tell)
    right, cheap = sum(one["right"] for one in found), sum(one["reruns"] <= one["most"] for one in found)
    said = f"{right} of {len(found)}"
    most = max(one["reruns"] / one["most"] for one in found)
    return [
        _row(
            "planted faults whose first round and clients bisect names",
            f"{len(found)} of {len(found)}",
            said,
            _met(right == len(found)),
            found,
            value=right,
        ),
        _row(
            "its re-runs, of 2·log2(rounds) + clients",
            "≤ 100 %",
            f"{cheap} of {len(found)} within; at most {100 * most:.0f} %, {sum(one['reruns'] for one in found)} in all",
            _met(cheap == len(found)),
            value=100 * most,
        ),
    ]
