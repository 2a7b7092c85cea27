# SPDX-License-Identifier: Apache-2.0
"""The budget of a probe that runs once per client-round: a share of the training's work, with clients taking turns.

Work is counted in sample-passes: a forward pass over one sample is 1, a backward pass 2, so a training step over a
batch is 3 × its samples. Whether a client is measured depends on its name, the round and such counts, never on a clock
or on what happened before in the same process: runs with the same seed measure the same clients on every machine, in
one process or in many.

A measurement that costs more than the client's share of its round is made once in several rounds. Floors apply whatever
the cost: each client is measured once in each block of `floor_rounds` rounds; and each round some client is measured,
if the block is short (the gradient scale's) or the round has at least half as many clients as the block has rounds, so
that this floor at most doubles the cost of the first one. In the first round, whose clients are not known in advance,
probes with a short block measure all clients, in order to see the initial weights.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fedvitals.protocols import Moment

if TYPE_CHECKING:
    from fedvitals.probes.presets import Preset

FORWARD, BACKWARD = 1, 2  # sample-passes
TRAINING = FORWARD + BACKWARD  # of each sample in a step
CALL = 16  # samples added to each forward pass, since that of a few samples is mostly overhead
STEP_SAMPLES = 16  # per step, if the batch size is unknown
FIRST_SAMPLES = 2048  # limit for a client-round whose number of steps is not known yet
SHORT_BLOCK = 4  # rounds of a block short enough to measure a lone client in each of its rounds
FLOOR_ROUNDS = 8  # rounds in which each client is measured once, unless the preset says otherwise
ALONE = "model"  # the node of a model watched without a federation: due in the first round
UNSTATED = 64  # samples in one forward pass: the assumed work of a probe that does not state its own

_ONE_NUMBER = re.compile(r"\D*(\d{1,20})")


def training_work(samples: int, steps: int | None, batch: int | None) -> float:
    """Return the sample-passes of a client-round's training.

    samples: the client's own. steps: of this round, or its expected number; None if unknown, which counts as one pass
    over the samples, up to FIRST_SAMPLES. batch: samples in a step; None if unknown.
    """
    if steps is None:
        trained = min(samples, FIRST_SAMPLES)
    else:
        trained = steps * (min(samples, STEP_SAMPLES) if batch is None else batch)
    return float(TRAINING * trained)


@dataclass(frozen=True, slots=True)
class Turn:
    """What determines, besides its name, whether a client is measured in a round: equal for all clients of a round.

    A worker process receives it with its task. `stand_ins` are clients that are measured because no other client of the
    round would be: by length of block, as (rounds, node). `everybody`: the blocks in which all are measured.
    """

    round_index: int | None = None
    steps: int | None = None  # of the median client in the previous round
    stand_ins: tuple[tuple[int, str], ...] = ()
    everybody: tuple[int, ...] = ()

    def lag(self, node: str, block: int) -> int:
        """Return how many rounds ago, within blocks of this length, the client was due; 0: in this round.

        The position of its round shifts by one from block to block: otherwise a client that takes part every few rounds
        might always miss its turn.
        """
        number = self.round_index or 0
        return (number - _place(node) - number // block) % block


class Turns:
    """The turns of a run whose rounds are known: the clients of the previous round, and their number of steps."""

    def __init__(self, preset: Preset) -> None:
        dear = {planned.floor_rounds for planned in preset.probes if planned.percent}
        self._first = tuple(sorted(block for block in dear if block <= SHORT_BLOCK))
        self._blocks = sorted(dear | ({preset.fit_floor_rounds} if preset.fit_percent else set()))
        self._steps: dict[str, int] = {}  # of this round's clients
        self._handed_out = False
        self._times: Counter[str | None] = Counter()
        self.now = Turn()

    def begin(self, round_index: int) -> None:
        """Begin a round: its clients are expected to be those of the previous round, and to train as long."""
        before, self._steps = self._steps, {}
        steps = statistics.median_low(before.values()) if before else self.now.steps
        first = self.now.round_index is None or (self.now.everybody and round_index == self.now.round_index)
        self.now = Turn(round_index, steps, everybody=self._first if first else ())
        self.now = replace(self.now, stand_ins=self._stand_ins(before))
        self._handed_out = False

    def note(self, node: str, steps: float) -> None:
        """Note how many steps a client of this round took."""
        if 0 <= steps < 1 << 40:
            self._steps[node] = int(steps)

    def hand_out(self, expected: Collection[str]) -> Turn:
        """Return the turn for a worker process. expected: the clients that are about to train, if known.

        Only the first call of a round uses them, because later it depends on speed which clients are still expected. A
        host that hands out one client at a time is expected to hand out those of the previous round.
        """
        if not self._handed_out and len(expected) > 1:
            self.now = replace(self.now, stand_ins=self._stand_ins(expected))
        self._handed_out = True
        return self.now

    def of(self, node: str | None, round_index: int | None) -> Turn:
        """Return the turn of a client in a round; without a number, the client's rounds in this process are counted."""
        now = self.now
        if round_index is None or round_index == now.round_index:
            if now.round_index is not None:
                return now
            self._times[node] += 1
            return Turn(self._times[node] - 1, now.steps)
        return Turn(round_index, now.steps)

    def _stand_ins(self, nodes: Iterable[str]) -> tuple[tuple[int, str], ...]:
        ordered = sorted(nodes)
        blocks = [block for block in self._blocks if 2 * len(ordered) >= block or block in self._first]
        if not ordered or not blocks:
            return ()
        chosen = ordered[(self.now.round_index or 0) % len(ordered)]
        return tuple((block, chosen) for block in blocks if all(self.now.lag(node, block) for node in ordered))


@runtime_checkable
class StatesWork(Protocol):
    """A probe that can state the sample-passes of one measurement."""

    def work(self, samples: int) -> float:
        """Return the sample-passes of one measurement of a client with this many samples."""
        ...


class Allowance:
    """A budget in percent of the training's sample-passes. None: every client-round; 0: none."""

    def __init__(self, percent: float | None, floor_rounds: int = FLOOR_ROUNDS) -> None:
        self.percent, self.floor_rounds = percent, floor_rounds

    def earned(self, work: float) -> float:
        """Return the sample-passes that a client-round's training allows."""
        return math.inf if self.percent is None else work * self.percent / 100

    def period(self, cost: float, work: float) -> int:
        """Return the interval in rounds between measurements of a client, from the sample-passes of probe and training.

        It divides the block, so that a client's turns in a block are evenly spread.
        """
        earned = self.earned(work)
        wanted = cost / earned if earned > 0 else math.inf
        block = self.floor_rounds
        return next((n for n in range(1, block) if n >= wanted and block % n == 0), block)

    def due(self, node: str | None, turn: Turn, cost: float, work: float) -> bool:
        """Return whether to measure this client in this round."""
        if self.percent is None:
            return True
        if not self.percent:
            return False
        name = node or ""
        if self.floor_rounds in turn.everybody or (self.floor_rounds, name) in turn.stand_ins:
            return True
        return turn.lag(name, self.floor_rounds) % self.period(cost, work) == 0


def one_step_in(n: int, moment: Moment) -> bool:
    """Return whether to measure a step: one in n, at positions that differ by client and round."""
    return (moment.step + _place(moment.node or "") + 7 * (moment.round or 0)) % n == 0


@functools.lru_cache(maxsize=1 << 16)
def _place(node: str) -> int:
    """Return the client's position among others: the only number in its name, if the name ends with it, else a hash.

    Numbered clients then take turns evenly.
    """
    if node == ALONE:
        return 0
    number = _ONE_NUMBER.fullmatch(node)
    if number:
        return int(number[1])
    return int.from_bytes(hashlib.blake2b(node.encode("utf-8", "surrogatepass"), digest_size=7).digest(), "big")
