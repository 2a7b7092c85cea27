# SPDX-License-Identifier: Apache-2.0
"""Find which average a plain loop took: several formulas differ only in their last bits, and the digest decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fedvitals.loop_tape import DELTA
from fedvitals.protocols import Message
from fedvitals.replay.tape.digests import Tensors, digest_of

Average = Callable[[Sequence[Tensor], Sequence[float]], Tensor]


def _stacked(tensors: Sequence[Tensor], _: Sequence[float]) -> Tensor:
    return torch.stack([_as_float(tensor) for tensor in tensors]).mean(0)


def _added(tensors: Sequence[Tensor], _: Sequence[float]) -> Tensor:
    return sum((_as_float(tensor) for tensor in tensors[1:]), _as_float(tensors[0]).clone()) / len(tensors)


def _stacked_by_weight(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    share = torch.tensor(weights, dtype=torch.float32) / sum(weights)
    stacked = torch.stack([_as_float(tensor) for tensor in tensors])
    return (stacked * share.to(stacked.device).view(-1, *[1] * (stacked.dim() - 1))).sum(0)


def _shares_added(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = sum(weights)
    parts = [_as_float(tensor) * (weight / total) for tensor, weight in zip(tensors, weights, strict=True)]
    return sum(parts[1:], parts[0])


def _added_then_divided(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    parts = [_as_float(tensor) * weight for tensor, weight in zip(tensors, weights, strict=True)]
    return sum(parts[1:], parts[0]) / sum(weights)


AVERAGES: Mapping[str, Average] = {
    "the mean, stacked": _stacked,
    "the mean, added up": _added,
    "by samples, shares added up": _shares_added,
    "by samples, added up and divided": _added_then_divided,
    "by samples, stacked": _stacked_by_weight,
}
UNCHANGED = "the state before, unchanged"


class AverageFinder:
    """Remembers which average matched, and tries that one first."""

    names = (*AVERAGES, UNCHANGED)

    def __init__(self) -> None:
        self.fitting: str | None = None

    def find(self, before: Tensors, messages: Sequence[Message], wanted: str) -> Tensors | None:
        """Return the averaged state that has the wanted digest; None if no formula gives it.

        Integer buffers may be rounded averages, the first client's, or unchanged; all are tried.
        """
        if digest_of(before) == wanted:
            self.fitting = self.fitting or UNCHANGED
            return before
        for name in sorted(AVERAGES, key=lambda candidate: candidate != self.fitting) if messages else ():
            for counts in (_rounded_count, _first_count, _unchanged_count):
                state = _averaged_state(AVERAGES[name], counts, before, messages)
                if digest_of(state) == wanted:
                    self.fitting = name
                    return state
        return None


CombineCounts = Callable[[Average, Tensor, Sequence[Tensor], Sequence[float]], Tensor]


def _rounded_count(average: Average, before: Tensor, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return average(tensors, weights).to(before.dtype)


def _first_count(_: Average, before: Tensor, tensors: Sequence[Tensor], __: Sequence[float]) -> Tensor:
    return tensors[0].to(before.dtype)


def _unchanged_count(_: Average, before: Tensor, __: Sequence[Tensor], ___: Sequence[float]) -> Tensor:
    return before


def _averaged_state(
    average: Average, counts: CombineCounts, before: Tensors, messages: Sequence[Message]
) -> dict[str, Tensor]:
    weights = [message.weight if message.weight > 0 else 1.0 for message in messages]
    difference = all((message.notes or {}).get("kind") == DELTA for message in messages)
    state: dict[str, Tensor] = {}
    for name, old in before.items():
        tensors = [message.tensors[name] for message in messages if message.tensors and name in message.tensors]
        if len(tensors) != len(messages):
            state[name] = old
        elif not old.is_floating_point():
            state[name] = counts(average, old, tensors, weights)
        else:
            mean = average(tensors, weights).to(old.dtype)
            state[name] = old + mean if difference else mean
    return state


def _as_float(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() else tensor.to(torch.float32)
