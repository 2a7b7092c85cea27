# SPDX-License-Identifier: Apache-2.0
"""The lab against its bars: faster than its peers although monitored, quick to start, small, the study done in hours.

Speeds are compared in one run: every side is started, warmed up by a first round, and then asked for rounds in turn. A
ratio is taken within each pass, since the machine's speed drifts; its median is given with a 95 % bootstrap interval of
that median. All begin with the same weights and train on the same mini-batches; a side whose loss or accuracy after the
first round differs has done different work, and no verdict is given.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvitals_studies.bench.lab import footprint
from fedvitals_studies.bench.lab.peers import (
    ENVIRONMENTS,
    Arm,
    Outcome,
    default_folder,
    differs,
    environment,
    interleaved,
    ours,
    peer,
)
from fedvitals_studies.bench.lab.study import study
from fedvitals_studies.bench.lab.work import Data, Subject, has_gtsrb, write_work

Row = dict[str, Any]
Tell = Callable[[str], None]

CNN_BARS = {"Flower": 1.8, "plain loop": 3.0, "pfl": 3.0}
MLP_BARS = {"Flower": 15.0, "plain loop": 15.0}
START_BAR, MEMORY_BAR, STUDY_BAR = 1.0, 1.5, 3.0  # seconds, times, hours
SMALL_UPDATE_MEMORY = 64 << 20
PARTS = ("cnn", "mlp", "start", "memory", "study")
PASSES = 25


def bench_lab(
    *,
    quick: bool = False,
    full: bool = False,
    peers: bool = False,
    data: Data = None,
    environments: Path | None = None,
    only: Sequence[str] = PARTS,
    tell: Tell = lambda _text: None,
) -> list[Row]:
    """Return rows for the table, one per bar. `full`: the paper's 100 clients where 20 are enough to compare speeds.

    `peers`: install what is missing. `only`: some of the parts.
    """
    folder = environments or default_folder()
    pythons = {name: environment(name, folder, install=peers, tell=tell) for name in ENVIRONMENTS}
    rows: list[Row] = []
    if "cnn" in only:
        clients = 4 if quick else 100 if full else 20
        subject = Subject("cnn", clients, 5 if quick else 20)
        rows += _speeds(subject, CNN_BARS, pythons, 2 if quick else 5 if full else PASSES, data, tell)
    if "mlp" in only:
        subject = Subject("mlp", 20 if quick else 100, 5 if quick else 20)
        rows += _speeds(subject, MLP_BARS, pythons, 2 if quick else PASSES, data, tell)
    measured = {"start": _start, "memory": _memory, "study": _study}
    for part in [name for name in measured if name in only]:
        tell(part)
        rows += measured[part](quick, data, tell)
    # Small sizes only show that it runs; the bars apply to the full sizes.
    return [{**row, "verdict": f"{row['verdict']} (quick)"} for row in rows] if quick else rows


# -- against the peers ------------------------------------------------------------------------------------------------


def _speeds(
    subject: Subject, bars: dict[str, float], pythons: dict[str, Path | str], passes: int, data: Data, tell: Tell
) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="fedvitals-bench-") as folder:
        work = Path(folder)
        dataset = write_work(subject, work, passes + 2, data)
        mine = ours(subject, data, block="round10" if subject.model == "mlp" else "round")
        outcomes = interleaved([mine, *_peers(bars, pythons, work)], passes, tell)
    model = "paper CNN" if subject.model == "cnn" else "MLP 32-64-10"
    what = f"{model}, {dataset}, {subject.clients} clients × {subject.iterations}, watched"
    return [_against(what, outcomes[mine.name], other, bars) for other in outcomes.values() if other.arm is not mine]


def _peers(bars: dict[str, float], pythons: dict[str, Path | str], work: Path) -> list[Arm]:
    """Return the peers with a bar; a single process both with one thread and with torch's default number."""
    here = Path(sys.executable) if (found := _scripts_missing(pythons)) is None else found
    arms = [
        peer("Flower", "flower_peer.py", pythons["flower"], work),
        peer("plain loop", "plain_loop.py", here, work),
        peer("plain loop, 2 threads", "plain_loop.py", here, work, threads=2),
        peer("pfl", "pfl_peer.py", pythons["pfl"], work),
        peer("pfl, 2 threads", "pfl_peer.py", pythons["pfl"], work, threads=2),
    ]
    return [arm for arm in arms if _kind(arm.name) in bars]


def _kind(name: str) -> str:
    return name.partition(",")[0]


def _scripts_missing(pythons: dict[str, Path | str]) -> str | None:
    missing = [why for why in pythons.values() if isinstance(why, str) and why.startswith("needs the source tree")]
    return missing[0] if missing else None


def _against(what: str, mine: Outcome, other: Outcome, bars: dict[str, float]) -> Row:
    bar = bars[_kind(other.arm.name)]
    row: Row = {"what": what, "against": other.arm.name, "bar": f"≥ {bar:g} ×", "value": None}
    failed = mine.failed or other.failed
    if failed:
        return {**row, "verdict": failed}
    pairs = [a / b for a, b in zip(mine.speeds, other.speeds, strict=True)]
    middle, low, high = _interval(pairs)
    apart = differs(mine, other)
    speeds = {"ours": float(np.median(mine.speeds)), "theirs": float(np.median(other.speeds))}
    return {
        **row,
        "value": middle,
        "low": low,
        "high": high,
        "verdict": apart or verdict(middle, low, high, least=bar),
        **speeds,
        "note": (
            f"{speeds['ours']:.0f} to {speeds['theirs']:.0f} client-steps/s; engine {mine.engine}; "
            f"loss {mine.loss:.5f}, {other.loss:.5f}; accuracy {mine.accuracy:.4f}, {other.accuracy:.4f}; "
            f"to the first round's end {mine.start_up:.1f} s, {other.start_up:.1f} s"
        ),
        "loss": [mine.loss, other.loss],
        "accuracy": [mine.accuracy, other.accuracy],
        "start_up": [mine.start_up, other.start_up],
        "speeds": {"ours": mine.speeds, "theirs": other.speeds},
    }


# -- on its own -------------------------------------------------------------------------------------------------------


def _start(quick: bool, data: Data, tell: Tell) -> list[Row]:
    rows = []
    paper = "paper CNN, GTSRB, 100 clients" if has_gtsrb(data) else "paper CNN, synthetic images, 100 clients"
    kinds = {"lab.Experiment() as it is": ("digits", 10), paper: ("cnn", 100), "MLP, 100 clients": ("mlp", 100)}
    for name, (kind, clients) in [*kinds.items()][: 1 if quick else None]:
        for engine in ("auto",) if quick or kind == "digits" else ("auto", "stacked" if kind == "mlp" else "reuse"):
            tell(f"start: {name}, engine {engine}")
            found = footprint.seconds_to_first_round(kind, clients, 2 if quick else 5, data, engine)
            times = [*found["seconds"]]
            middle, low, high = float(np.median(times)), min(times), max(times)
            rows.append(
                {
                    "what": f"first round begun after import torch: {name}",
                    "against": f"engine {engine}",
                    "bar": f"≤ {START_BAR:g} s",
                    "value": middle,
                    "low": low,
                    "high": high,
                    "verdict": verdict(middle, low, high, most=START_BAR),
                    "note": f"imports of ours {np.median(found['imports']):.2f} s of it; {len(times)} processes",
                }
            )
    return rows


def _memory(quick: bool, data: Data, tell: Tell) -> list[Row]:
    few, many, repeats = (4, 40, 1) if quick else (100, 1000, 3)
    what = f"memory of {many} clients, over that of {few}"
    row: Row = {"what": what, "bar": f"≤ {MEMORY_BAR:g} ×", "value": None}
    if not footprint.has_proportional_memory():
        return [{**row, "verdict": "not measured: needs Linux's /proc"}]
    small = f"watched, update_memory={SMALL_UPDATE_MEMORY >> 20} MiB"
    kinds: dict[str, dict[str, object]] = {
        "watched": {},
        small: {"update_memory": SMALL_UPDATE_MEMORY},
        "unwatched": {"watch": "nothing"},
    }
    rows = []
    for name, options in kinds.items():
        tell(f"memory: {name}")
        peaks = [
            [footprint.peak_bytes(n, data, engine="reuse", workers=2, **options) for n in (few, many)]
            for _ in range(repeats)
        ]
        ratios = [b / a for a, b in peaks]
        middle, low, high = float(np.median(ratios)), min(ratios), max(ratios)
        least, most = np.median(peaks, axis=0) / 2**20
        rows.append(
            {
                **row,
                "against": name,
                "value": middle,
                "low": low,
                "high": high,
                "verdict": verdict(middle, low, high, most=MEMORY_BAR),
                "note": f"{least:.0f} and {most:.0f} MiB at the most: all processes, what they share counted once",
            }
        )
    return rows


def _study(quick: bool, data: Data, tell: Tell) -> list[Row]:
    found = study(data=data, quick=quick, tell=tell)
    low, middle, high = found["low"], found["middle"], found["high"]
    where = "GTSRB" if has_gtsrb(data) else "synthetic images"
    added = "" if found["added percent"] is None else f", +{found['added percent']:.0f} % of those conditions"
    shown = ", ".join(f"{name} {value:.1f}" for name, value in found["rounds"].items())
    return [
        {
            "what": f"one repeat of the whole study, {where}, metrics at the last iteration of each round",
            "against": "3 rounds of each condition",
            "bar": f"≤ {STUDY_BAR:g} h",
            "value": middle,
            "low": low,
            "high": high,
            "verdict": verdict(middle, low, high, most=STUDY_BAR),
            "note": f"{found['as asked']:.2f} h with the hierarchical ones measured at every iteration{added}; "
            f"seconds a round: {shown}",
            "rounds": found["rounds"],
        }
    ]


# -- judging ----------------------------------------------------------------------------------------------------------


def verdict(value: float, low: float, high: float, *, least: float | None = None, most: float | None = None) -> str:
    """Return «met» or «missed», by the middle value; «narrowly» if the interval includes the bar."""
    bar = least if least is not None else most
    assert bar is not None  # noqa: S101 - one of the two is given
    met = value >= bar if least is not None else value <= bar
    return ("met" if met else "missed") + (" narrowly" if low < bar < high else "")


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the range of 95 % of the medians of bootstrap samples."""
    draws = np.random.default_rng(0).choice(np.array(values), (2000, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)
