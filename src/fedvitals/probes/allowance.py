# SPDX-License-Identifier: Apache-2.0
"""The budget of a probe that runs once per client-round: a share of the training's work, with clients taking turns.

Work is counted in sample-passes: a forward pass over one sample is 1, a backward pass 2, so a training step over a
batch is 3 × its samples. Whether a client is measured depends on its name, the round and such counts, never on a clock
or on what happened before in the same process: runs with the same seed measure the same clients on every machine, in
one process or in many.

A measurement that costs more than the client's share of its round is made once in several rounds. Floors hold
whatever it costs: each client is measured once in each block of `floor_rounds` rounds; and each round some client is,
if the block is short (the gradient scale's) or the clients of the round are at least half as many as the block has
rounds, so that this floor at most doubles what the first one costs. In the first round, of which nobody is known to
take part, probes with a short block measure everybody: that is how the first weights are seen.
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
CALL = 16  # samples that a forward pass counts in addition, since that of a few samples is mostly overhead
STEP_SAMPLES = 16  # in a step, where the batch size is not known
FIRST_SAMPLES = 2048  # at most in a client-round, where the number of steps is not known yet
SHORT_BLOCK = 4  # rounds of a block in each of whose rounds a lone client is measured
FLOOR_ROUNDS = 8  # rounds in which each client is measured once, unless the preset says otherwise
ALONE = "model"  # the node of a model that is watched without a federation: due in the first round
UNSTATED = 64  # samples through one forward pass: the work of a probe that does not state its own

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
    """What decides whether a client is measured in a round, beside its name: the same for all clients of the round.

    A worker process gets it along with its task. `stand_ins` are the clients that are measured because nobody else of
    the round would be: by length of block, as (rounds, node). `everybody`: the blocks in which all are measured.
    """

    round_index: int | None = None
    steps: int | None = None  # of the median client in the round before
    stand_ins: tuple[tuple[int, str], ...] = ()
    everybody: tuple[int, ...] = ()

    def lag(self, node: str, block: int) -> int:
        """Return how many rounds ago, within blocks of so many rounds, the client was due; 0: in this round.

        The place of its round in the block moves by one from block to block: else a client that takes part every few
        rounds might always miss its own.
        """
        number = self.round_index or 0
        return (number - _place(node) - number // block) % block


class Turns:
    """The turns of a run, where its rounds are known: who took part in the round before, and for how many steps."""

    def __init__(self, preset: Preset) -> None:
        dear = {planned.floor_rounds for planned in preset.probes if planned.percent}
        self._first = tuple(sorted(block for block in dear if block <= SHORT_BLOCK))
        self._blocks = sorted(dear | ({preset.fit_floor_rounds} if preset.fit_percent else set()))
        self._steps: dict[str, int] = {}  # of the clients of this round
        self._handed_out = False
        self._times: Counter[str | None] = Counter()
        self.now = Turn()

    def begin(self, round_index: int) -> None:
        """Begin a round: its clients are expected to be those of the round before, and to train as long."""
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

        Only the first call of a round looks at them: later, who is still expected depends on who was quickest. A host
        that hands out one client at a time is expected to hand out those of the round before.
        """
        if not self._handed_out and len(expected) > 1:
            self.now = replace(self.now, stand_ins=self._stand_ins(expected))
        self._handed_out = True
        return self.now

    def of(self, node: str | None, round_index: int | None) -> Turn:
        """Return the turn of a client in a round; one without a number counts the client's rounds in this process."""
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
    """A probe that knows the sample-passes of one measurement."""

    def work(self, samples: int) -> float:
        """Return the sample-passes of one measurement of a client with so many samples."""
        ...


class Allowance:
    """A budget in percent of the training's sample-passes. None: every client-round; 0: none."""

    def __init__(self, percent: float | None, floor_rounds: int = FLOOR_ROUNDS) -> None:
        self.percent, self.floor_rounds = percent, floor_rounds

    def earned(self, work: float) -> float:
        """Return the sample-passes that a client-round's training allows."""
        return math.inf if self.percent is None else work * self.percent / 100

    def period(self, cost: float, work: float) -> int:
        """Return in how many rounds the client is measured once, at these sample-passes of probe and training.

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
    """The schedule of a probe that measures single steps: one in n, other ones for each client and in each round."""
    return (moment.step + _place(moment.node or "") + 7 * (moment.round or 0)) % n == 0


@functools.lru_cache(maxsize=1 << 16)
def _place(node: str) -> int:
    """Return the client's place among others: the number in its name, if it ends with the only one, else a hash.

    Numbered clients then take turns evenly.
    """
    if node == ALONE:
        return 0
    number = _ONE_NUMBER.fullmatch(node)
    if number:
        return int(number[1])
    return int.from_bytes(hashlib.blake2b(node.encode("utf-8", "surrogatepass"), digest_size=7).digest(), "big")
