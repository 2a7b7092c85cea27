# SPDX-License-Identifier: Apache-2.0
"""Which average a loop took: several are written in the same words and differ in their last bits. The digest tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fedvitals.loop_tape import DELTA
from fedvitals.protocols import Message
from fedvitals.replay.tape.digests import Tensors, digest_of

Average = Callable[[Sequence[Tensor], Sequence[float]], Tensor]


def _stacked(tensors: Sequence[Tensor], _: Sequence[float]) -> Tensor:
    return torch.stack([_real(one) for one in tensors]).mean(0)


def _added(tensors: Sequence[Tensor], _: Sequence[float]) -> Tensor:
    return sum((_real(one) for one in tensors[1:]), _real(tensors[0]).clone()) / len(tensors)


def _stacked_by_weight(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    share = torch.tensor(weights, dtype=torch.float32) / sum(weights)
    stacked = torch.stack([_real(one) for one in tensors])
    return (stacked * share.to(stacked.device).view(-1, *[1] * (stacked.dim() - 1))).sum(0)


def _shares_added(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = sum(weights)
    parts = [_real(one) * (weight / total) for one, weight in zip(tensors, weights, strict=True)]
    return sum(parts[1:], parts[0])


def _added_then_divided(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    parts = [_real(one) * weight for one, weight in zip(tensors, weights, strict=True)]
    return sum(parts[1:], parts[0]) / sum(weights)


AVERAGES: Mapping[str, Average] = {
    "the mean, stacked": _stacked,
    "the mean, added up": _added,
    "by samples, shares added up": _shares_added,
    "by samples, added up and divided": _added_then_divided,
    "by samples, stacked": _stacked_by_weight,
}
UNCHANGED = "the state before, unchanged"


class Averages:
    """Remembers which one fits, and tries that one first."""

    names = (*AVERAGES, UNCHANGED)

    def __init__(self) -> None:
        self.fitting: str | None = None

    def of(self, before: Tensors, messages: Sequence[Message], wanted: str) -> Tensors | None:
        """The average that has the wanted digest; None where no one has. Buffers that are counts may be anybody's."""
        if digest_of(before) == wanted:
            self.fitting = self.fitting or UNCHANGED
            return before
        for name in sorted(AVERAGES, key=lambda one: one != self.fitting) if messages else ():
            for counts in (_rounded, _first, _kept):
                found = _state(AVERAGES[name], counts, before, messages)
                if digest_of(found) == wanted:
                    self.fitting = name
                    return found
        return None


Counts = Callable[[Average, Tensor, Sequence[Tensor], Sequence[float]], Tensor]


def _rounded(average: Average, before: Tensor, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return average(tensors, weights).to(before.dtype)


def _first(_: Average, before: Tensor, tensors: Sequence[Tensor], __: Sequence[float]) -> Tensor:
    return tensors[0].to(before.dtype)


def _kept(_: Average, before: Tensor, __: Sequence[Tensor], ___: Sequence[float]) -> Tensor:
    return before


def _state(average: Average, counts: Counts, before: Tensors, messages: Sequence[Message]) -> dict[str, Tensor]:
    weights = [message.weight if message.weight > 0 else 1.0 for message in messages]
    difference = all((message.notes or {}).get("kind") == DELTA for message in messages)
    found: dict[str, Tensor] = {}
    for name, old in before.items():
        tensors = [message.tensors[name] for message in messages if message.tensors and name in message.tensors]
        if len(tensors) != len(messages):
            found[name] = old
        elif not old.is_floating_point():
            found[name] = counts(average, old, tensors, weights)
        else:
            mean = average(tensors, weights).to(old.dtype)
            found[name] = old + mean if difference else mean
    return found


def _real(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() else tensor.to(torch.float32)
