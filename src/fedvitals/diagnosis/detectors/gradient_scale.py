# SPDX-License-Identifier: Apache-2.0
"""A detector on the gradient scale coefficient (GSC): its level and trend against the run's own past, and its level
against earlier runs of the same model in the same store.

GSC has no healthy level of its own: it grows with the square of the network's gain, and training raises it. So it is
compared with itself, in orders of magnitude. The level of a round is the median of what clients measured in it and in
the round before, since they take turns; for a rise the lower median counts and for a fall the higher one, so that no
single client can cause a finding.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History
from fedvitals.records import EARLIER_SCALES, Finding, is_client

METRIC = "scale.gsc"
JUMP = 2.0  # orders of magnitude from the median of the run's own past; healthy runs moved by up to 1.3
PAST, FEWEST_ROUNDS = 8, 3  # rounds of the run's own past, and how many of them are needed
STEADY, STEADY_ROUNDS = 0.4, 6  # orders per round, in each of this many rounds: a trend; healthy runs had 3 such rounds
APART = 3.0  # orders beyond the range of earlier runs in the same round
FEWEST_RUNS = 2  # earlier runs of the same model
LEAST = 1e-30  # stands for 0 on a logarithmic axis


def gradient_scale(history: History, round_index: int) -> Iterator[Finding]:
    """GRADIENT_SCALE: GSC orders of magnitude away from the run's own past or from earlier runs of the same model, or
    growing steadily by orders of magnitude.
    """
    newest = _values(history, round_index)
    if not newest:
        return
    yield from _against_earlier_runs(history, round_index, newest)
    past = {r: values for r in range(max(0, round_index - PAST), round_index - 1) if (values := _values(history, r))}
    if len(past) >= FEWEST_ROUNDS:
        yield from _against_own_past(
            round_index, newest, [_orders(values, statistics.median) for values in past.values()]
        )
    yield from _steady(history, round_index)


def _against_own_past(round_index: int, newest: Sequence[float], past: Sequence[float]) -> Iterator[Finding]:
    usual = statistics.median(past)
    for side, middle in ((1, statistics.median_low), (-1, statistics.median_high)):
        level = _orders(newest, middle)
        # A run whose scale swings has jumped only if it is beyond its own swings.
        if side * (level - usual) > JUMP and side * level > max(side * each for each in past) + JUMP / 2:
            yield _finding(
                round_index,
                f"The gradient scale (GSC) is {_words(level - usual)} the {len(past)} rounds before: {_scale(level)} "
                f"against {_scale(usual)}.",
                [Number(METRIC, _number(level), _number(usual), of="own past")],
            )


def _steady(history: History, round_index: int) -> Iterator[Finding]:
    rounds = [_values(history, r) for r in range(round_index - STEADY_ROUNDS, round_index + 1) if r >= 0]
    if len(rounds) <= STEADY_ROUNDS or not all(rounds):
        return
    levels = [_orders(values, statistics.median) for values in rounds]
    steps = np.diff(levels)
    if (steps >= STEADY).all() or (steps <= -STEADY).all():
        yield _finding(
            round_index,
            f"The gradient scale (GSC) {'grows' if steps[0] > 0 else 'falls'} by "
            f"{abs(levels[-1] - levels[0]) / STEADY_ROUNDS:.1f} orders of magnitude a round, for {STEADY_ROUNDS} "
            f"rounds: from {_scale(levels[0])} to {_scale(levels[-1])}.",
            [Number(METRIC, _number(levels[-1]), _number(levels[0]), of="own past")],
            since=round_index - STEADY_ROUNDS,
        )


def _against_earlier_runs(history: History, round_index: int, newest: Sequence[float]) -> Iterator[Finding]:
    events = history.events(EARLIER_SCALES)
    earlier = _levels_in_round(events[-1].data["runs"], round_index) if events else {}
    if len(earlier) < FEWEST_RUNS:
        return
    low, high = min(earlier.values()), max(earlier.values())
    up, down = _orders(newest, statistics.median_low), _orders(newest, statistics.median_high)
    distance = up - high if up - high > APART else down - low if low - down > APART else 0.0
    if not distance:
        return
    level = up if distance > 0 else down
    between = _scale(low) if high - low < 0.05 else f"{_scale(low)} to {_scale(high)}"
    yield _finding(
        round_index,
        f"The gradient scale (GSC) is {_words(distance)} the last {len(earlier)} runs of this model in this round: "
        f"{_scale(level)} against {between}.",
        [Number(METRIC, _number(level), _number(high if distance > 0 else low), of="earlier runs")],
        more={"runs": [*earlier]},
    )


def _levels_in_round(runs: Sequence[Mapping[str, object]], round_index: int) -> dict[str, float]:
    """Return each earlier run's level in this round, or in the last round before it that has one, by the run's name."""
    levels: dict[str, float] = {}
    for run in runs:
        rounds = {int(number): float(value) for number, value in dict(run["levels"]).items()}  # type: ignore[call-overload]
        known = [number for number in rounds if number <= round_index]
        if known:
            levels[str(run["id"])] = math.log10(max(rounds[max(known)], LEAST))
    return levels


def _values(history: History, round_index: int) -> list[float]:
    """Return each client's newest GSC of this round and the one before; [] if only one of several clients has one."""
    newest: dict[str, float] = {}
    for number in (round_index - 1, round_index):
        if number >= 0:
            newest |= {node: v for node, v in history.latest(METRIC, number).items() if not math.isnan(v)}
    alone = sum(map(is_client, history.nodes())) <= 1
    return [*newest.values()] if len(newest) > 1 or alone else []


def _orders(values: Sequence[float], middle: Callable[[Sequence[float]], float]) -> float:
    return math.log10(min(max(middle(values), LEAST), 1e300))


def _number(level: float) -> float:
    return 0.0 if level <= math.log10(LEAST) else 10.0**level


def _scale(level: float) -> str:
    return f"{_number(level):.2g}"


def _words(orders: float) -> str:
    side = "above" if orders > 0 else "below"
    return f"far {side}" if abs(orders) > -math.log10(LEAST) / 2 else f"{abs(orders):.0f} orders of magnitude {side}"


def _finding(
    round_index: int, text: str, numbers: list[Number], since: int | None = None, more: dict[str, object] | None = None
) -> Finding:
    return finding(
        "GRADIENT_SCALE",
        round_index,
        text,
        confidence=0.9,
        since=round_index if since is None else since,
        numbers=numbers,
        more=more or {},
    )


DETECTORS: tuple[Detector, ...] = (gradient_scale,)
