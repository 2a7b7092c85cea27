# SPDX-License-Identifier: Apache-2.0
"""False alarms of the sequential decisions where nothing is wrong, by simulation, beside what is claimed of them.

    python -m fedvitals_studies.faultbank.null_alarms [--runs 100] [--json FILE]

The detectors themselves run, on invented numbers of healthy clients: signs that scatter, fail, or depend on each other.
Which statistic and limit each decision has: docs/method.md, «False alarms of repeated looks».
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator

from fedvitals.diagnosis.corrections.correction_trials import judge_correction, loss_trend_of
from fedvitals.diagnosis.detectors.absence import CHANCE, frequent_failures
from fedvitals.diagnosis.detectors.system import stragglers
from fedvitals.diagnosis.evidence.attendance import LOOK_BACK
from fedvitals.diagnosis.evidence.own_past import ALLOWANCE, LIMIT, LOSS, OwnPast
from fedvitals.diagnosis.evidence.suspect_data import FLIP_LIMIT, USUAL_PAIRS, examine_data
from fedvitals.probes.data_sketch import describe
from fedvitals.protocols import History
from fedvitals.records import Event, Metric, Where
from fedvitals.store import MemoryStore
from fedvitals_studies.faultbank.intervals import poisson_rate

RUN = "null"
CLIENTS, ROUNDS = 10, 60
OVERSHOOT = 1.166  # twice 0.583: the mean excess of a sum of normal steps over a limit (Siegmund 1985)
WATCH = 3  # rounds of a correction's trial


@dataclass(frozen=True, slots=True)
class NullRate:
    """Alarms of one decision under one null hypothesis, per 100 looks, with a 95 % interval."""

    decision: str
    null: str
    look: str  # the unit that is counted
    claimed: float | None  # per 100 looks; None: nothing is claimed, the limit is empirical
    alarms: int
    looks: int

    @property
    def words(self) -> str:
        """Return the rate as a row of a Markdown table."""
        rate = poisson_rate(self.alarms, self.looks)
        claimed = "none (empirical)" if self.claimed is None else f"≤ {self.claimed:.2g}"
        measured = f"{rate.value:.3g} ({rate.low:.2g} to {rate.high:.2g})"
        return (
            f"| {self.decision} | {self.null} | {claimed} | {measured} | {self.alarms} of {self.looks:,} {self.look} |"
        )


def rates(runs: int) -> Iterator[NullRate]:
    """Yield the measured rates of all decisions, from `runs` runs each."""
    yield from own_past_rates(runs)
    yield from failure_rates(runs)
    yield from straggler_rates(runs)
    yield data_rate(runs)
    yield from trial_rates(100 * runs)


# -- one decision after the other -------------------------------------------------------------------------------------


def cusum_rate(allowance: float = ALLOWANCE, limit: float = LIMIT) -> float:
    """Return how often per look a one-sided CUSUM of standard normal scores exceeds its limit, by Siegmund's formula.

    1 / ARL, where ARL = (exp(2kb) − 1 − 2kb) / 2k² with allowance k and b = limit + 1.166.
    """
    exponent = 2 * allowance * (limit + OVERSHOOT)
    return 2 * allowance**2 / (math.exp(exponent) - 1 - exponent)


def own_past_rates(runs: int) -> Iterator[NullRate]:
    """Yield rates for falling losses of clients with unequally difficult data: normal, heavy-tailed, slow scatter."""
    nulls: Mapping[str, tuple[Callable[[Generator], np.ndarray[Any, Any]], float | None]] = {
        "normal scatter of 15 %": (lambda chance: chance.normal(0, 0.15, (ROUNDS, CLIENTS)), 100 * cusum_rate()),
        "the same, Student's t with 3 degrees": (
            lambda chance: 0.15 * chance.standard_t(3, (ROUNDS, CLIENTS)) / math.sqrt(3),
            None,
        ),
        "each round 0.8 of the last, and normal": (lambda chance: _autoregressive(chance, 0.8, 0.15), None),
    }
    for name, (scatter, claimed) in nulls.items():
        alarms = 0
        for seed in range(runs):
            chance = np.random.default_rng(seed)
            level = -0.1 * np.arange(ROUNDS)[:, None] + chance.normal(0, 0.4, CLIENTS)
            history = _history({"fit.loss_before": np.exp(level + scatter(chance)) + 0.05})
            past, accused = OwnPast(LOSS), set[str]()
            for number in range(ROUNDS):
                past.add_round(history, number)
                accused |= past.changes.keys()
            alarms += len(accused)
        yield NullRate("own past (CUSUM)", name, "client-rounds", claimed, alarms, runs * ROUNDS * CLIENTS)


def failure_rates(runs: int) -> Iterator[NullRate]:
    """Yield rates for calls that fail independently of each other, with every client at the same rate."""
    for share in (0.01, 0.05, 0.08):
        alarms = 0
        for seed in range(runs):
            failed = np.random.default_rng(seed).random((ROUNDS, CLIENTS)) < share
            history = _history({"steps": np.where(failed, np.nan, 4.0)}, _failures(failed))
            alarms += _accused(
                history, lambda h, r: frequent_failures(h, r, "DROP_OUT", "failed", "client.dropped_out")
            )
        name = f"calls fail with probability {share:.0%}"
        claimed = 100 * CHANCE * LOOK_BACK  # this many series of calls end in this round, and any of them accuses
        yield NullRate("more failures than others", name, "client-rounds", claimed, alarms, runs * ROUNDS * CLIENTS)


def straggler_rates(runs: int) -> Iterator[NullRate]:
    """Yield rates for times that scatter by a log-normal factor, newly drawn in each round."""
    for spread in (0.3, 0.6, 0.9):
        alarms = 0
        for seed in range(runs):
            seconds = np.exp(np.random.default_rng(seed).normal(0, spread, (ROUNDS, CLIENTS)))
            alarms += _accused(
                _history({"time.client_virtual": seconds, "steps": np.full_like(seconds, 4.0)}), stragglers
            )
        name = f"log-normal times, σ = {spread:g}"
        crossing = 0.5 * math.erfc(math.log(2) / spread / math.sqrt(2))  # of twice the median, in one round
        claimed = 100 * crossing**3
        yield NullRate("slow three rounds in a row", name, "client-rounds", claimed, alarms, runs * ROUNDS * CLIENTS)


def data_rate(runs: int) -> NullRate:
    """Return the rate for healthy clients' data of ten normal classes, described once and compared with the peers'."""
    alarms, classes = 0, 10
    for seed in range(runs):
        chance = np.random.default_rng(seed)
        centres = chance.normal(0, 1.5, (classes, 12))
        events = []
        for client in range(CLIENTS):
            y = chance.integers(0, classes, 120)
            x = centres[y] + chance.normal(size=(120, 12))
            description = describe(torch.tensor(x, dtype=torch.float32), torch.tensor(y), len(y))
            assert description is not None  # noqa: S101 - numbers with labels can be described
            name, text, data = description.remark(0)
            events.append(Event(Where(RUN, 0, f"c{client}"), 0.0, "info", name, text, data, f"c{client}", 1))
        history = _history({"steps": np.full((1, CLIENTS), 4.0)}, events)
        alarms += len(examine_data(history, 0).suspects)
    # A log-likelihood ratio of L with one positive parameter: half the probability that χ² with 1 degree exceeds 2 L.
    pairs = classes * (classes - 1)
    flips = pairs * 0.5 * math.erfc(math.sqrt(FLIP_LIMIT + math.log(CLIENTS * pairs / USUAL_PAIRS)))
    noise, spread = 0.5 * math.erfc(math.sqrt(16 / 2)), math.erfc(4.5 / math.sqrt(2))
    claimed = 100 * (flips + noise + spread)
    return NullRate("data against peers", "ten normal classes", "descriptions", claimed, alarms, runs * CLIENTS)


def trial_rates(trials: int) -> Iterator[NullRate]:
    """Yield rates for corrections without effect, in runs that learn at a steady rate: how many are judged better, and
    how many worse.
    """
    for noise in (0.02, 0.1):
        counts = {"better": 0, "worse": 0}
        for seed in range(trials):
            chance = np.random.default_rng(seed)
            logs = -0.05 * np.arange(5 + WATCH) + chance.normal(0, noise, 5 + WATCH)
            losses = dict(enumerate(np.exp(logs).tolist()))
            before = loss_trend_of(losses, 4)
            looks = [judge_correction(before, [losses[5 + i] for i in range(n)]) for n in range(2, WATCH + 1)]
            verdict = "worse" if "worse" in looks else looks[-1]
            counts[verdict] = counts.get(verdict, 0) + 1
        null = f"loss falls by 5 % a round, scatter {noise:g}"
        yield NullRate("a useless correction is kept", null, "trials", None, counts["better"], trials)
        yield NullRate("a harmless correction is called harmful", null, "trials", None, counts["worse"], trials)


# -- synthetic histories ---------------------------------------------------------------------------------------------


def _autoregressive(chance: Generator, memory: float, spread: float) -> np.ndarray[Any, Any]:
    values = chance.normal(0, spread, (ROUNDS, CLIENTS))
    for number in range(1, ROUNDS):
        values[number] = memory * values[number - 1] + math.sqrt(1 - memory**2) * values[number]
    return values


def _history(metrics: Mapping[str, np.ndarray[Any, Any]], events: Iterable[Event] = ()) -> History:
    """Return a history of metrics, [rounds, clients] each; NaN: the client reported nothing."""
    store = MemoryStore()
    store.write([*events])
    columns = [(name, values, node) for name, values in metrics.items() for node in range(values.shape[1])]
    if "steps" not in metrics:
        first = next(iter(metrics.values()))
        columns += [("steps", np.ones(first.shape), node) for node in range(first.shape[1])]
    store.write(
        [
            Metric(Where(RUN, number, f"c{node}"), float(number), name, float(value), f"{name} c{node}", number)
            for name, values, node in columns
            for number, value in enumerate(values[:, node])
            if not math.isnan(value)
        ]
    )
    return store.history(RUN)


def _failures(failed: np.ndarray[Any, Any]) -> list[Event]:
    return [
        Event(
            Where(RUN, int(number), f"c{node}"), float(number), "warning", "client.dropped_out", "", {}, f"c{node}", i
        )
        for i, (number, node) in enumerate(np.argwhere(failed))
    ]


def _accused(history: History, detector: Callable[[History, int], Iterable[Any]]) -> int:
    """Return how many clients a detector accuses in any round, each once; notes do not accuse."""
    accused = {
        found.where.node for number in range(ROUNDS) for found in detector(history, number) if found.severity != "note"
    }
    return len(accused)


def main() -> None:
    """Print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sys.stdout.write("| decision | null hypothesis | claimed per 100 | measured per 100 (95 %) | alarms |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- |\n")
    measured = []
    for rate in rates(given.runs):
        measured.append(asdict(rate))
        sys.stdout.write(f"{rate.words}\n")
        sys.stdout.flush()
    if given.json is not None:
        given.json.write_text(json.dumps(measured, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
