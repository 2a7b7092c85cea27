# SPDX-License-Identifier: Apache-2.0
"""A model's state as one flat vector: parameters first, then buffers; and how to find a layer in it.

Everything that travels, is averaged, attacked, compressed or saved is such a vector (float32, [size]), or a matrix of
them ([clients, size]). Whole numbers in buffers, such as the batches counted by a batch norm, are kept as float32,
which holds them exactly up to 16 million.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class StateLayout:
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    trained: int  # how many of the names are parameters; the rest are buffers
    size: int  # of the whole vector
    weights: int  # how much of it is parameters: vector[:weights]

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        parameters = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
        buffers = [(name, tuple(b.shape)) for name, b in module.named_buffers()]
        names, shapes = zip(*parameters, *buffers, strict=True)
        sizes = [math.prod(shape) for shape in shapes]
        return cls(names, shapes, len(parameters), sum(sizes), sum(sizes[: len(parameters)]))

    def views(self, flat: Tensor) -> Mapping[str, Tensor]:
        """The tensors by name, as views: of one state, or with a leading axis of clients of a matrix [clients, size].

        A shorter vector, such as a gradient (`flat[:weights]`), gives the names that it covers.
        """
        views, offset = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            length = math.prod(shape)
            if offset + length > flat.shape[-1]:
                break
            views[name] = flat[..., offset : offset + length].view((*flat.shape[:-1], *shape))
            offset += length
        return views

    def flat(self, module: nn.Module) -> Tensor:
        """A copy of the module's state."""
        parts = [t.detach().reshape(-1).to(torch.float32) for t in state_tensors(module)]
        return torch.cat(parts).clone()

    def load(self, module: nn.Module, flat: Tensor) -> None:
        """Into the module's own tensors, in place."""
        with torch.no_grad():
            for target, source in zip(state_tensors(module), self.views(flat).values(), strict=True):
                target.copy_(source)


class SplitVector(list[Tensor]):
    """A flat vector cut into its tensors, each flat; who wants it in one piece again finds it in `vector`."""

    def __init__(self, vector: Tensor, sizes: Sequence[int]) -> None:
        super().__init__(vector.split([*sizes]))
        self.vector = vector


class NamedTensors(Mapping[str, Tensor]):
    """The tensors of one flat vector by name. Views are made when somebody looks: a tape, on a thread of its own."""

    __slots__ = ("_views", "flat", "layout")

    def __init__(self, layout: StateLayout, flat: Tensor) -> None:
        self.layout, self.flat = layout, flat
        self._views: Mapping[str, Tensor] | None = None

    @property
    def views(self) -> Mapping[str, Tensor]:
        if self._views is None:
            self._views = self.layout.views(self.flat)
        return self._views

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.views)

    def __len__(self) -> int:
        return len(self.views)


def state_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
