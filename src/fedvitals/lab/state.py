# SPDX-License-Identifier: Apache-2.0
"""A model's state as one flat vector: the parameters that train first, then buffers. Frozen parameters are no part.

Everything that is sent, averaged, attacked, compressed or saved is such a vector (float32, [size]), or a matrix of them
([clients, size]). Integers in buffers, such as a batch norm's count of batches, are kept as float32, which is exact up
to 16 million.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from fedvitals.loop_tape import TensorCopies


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The names and shapes of a model's tensors within its flat state."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    trained: int  # how many of the names are parameters; the rest are buffers
    size: int  # of the whole vector
    weights: int  # how much of it is parameters: vector[:weights]

    @classmethod
    def of(cls, module: nn.Module, *, without: Collection[str] = (), only: Collection[str] | None = None) -> Self:
        """Return the layout of a module's state, of some tensors only or without some."""

        def wanted(name: str) -> bool:
            return name not in without and (only is None or name in only)

        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        parameters = [(name, tuple(p.shape)) for name, p in trained if wanted(name)]
        buffers = [(name, tuple(b.shape)) for name, b in module.named_buffers() if wanted(name)]
        names, shapes = zip(*parameters, *buffers, strict=True)
        sizes = [math.prod(shape) for shape in shapes]
        return cls(names, shapes, len(parameters), sum(sizes), sum(sizes[: len(parameters)]))

    def views(self, flat: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors by name, as views of one state, or of a matrix [clients, size] with a leading axis of
        clients.

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

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """Return the module's own tensors in the order of the layout."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return [tensors[name] for name in self.names]

    def flat(self, module: nn.Module) -> Tensor:
        """Return a copy of the module's state as a flat vector."""
        parts = [t.detach().reshape(-1).to(torch.float32) for t in self.tensors(module)]
        return torch.cat(parts).clone()

    def load(self, module: nn.Module, flat: Tensor) -> None:
        """Copy a flat state into the module's own tensors."""
        with torch.no_grad():
            for target, source in zip(self.tensors(module), self.views(flat).values(), strict=True):
                target.copy_(source)


class SplitVector(list[Tensor]):
    """The tensors that a flat vector is split into, each flat; the whole vector remains available as `vector`."""

    def __init__(self, vector: Tensor, parts: Iterable[Tensor]) -> None:
        super().__init__(parts)
        self.vector = vector


class NamedTensors(Mapping[str, Tensor]):
    """The tensors of one flat vector by name. The views are created on first access, which may be on a tape's
    thread. `owner` is kept as long as this object: the owner of the vector's memory.
    """

    __slots__ = ("_owner", "_views", "flat", "layout")

    def __init__(self, layout: StateLayout, flat: Tensor, owner: object = None) -> None:
        self.layout, self.flat, self._owner = layout, flat, owner
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


class StateCopies:
    """Copies flat vectors on the CPU, for a tape, into memory that is reused (see `TensorCopies`)."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout, self._copies = layout, TensorCopies()

    def __call__(self, vectors: Sequence[Tensor]) -> list[NamedTensors]:
        """Return a copy of each vector; those of one kind are fetched from a device together."""
        hosted = [*vectors]
        on_device: dict[tuple[object, ...], list[int]] = {}
        for index, vector in enumerate(hosted):
            if not vector.is_cpu:
                on_device.setdefault((vector.device, vector.shape, vector.dtype), []).append(index)
        for indices in on_device.values():
            for index, row in zip(indices, torch.stack([hosted[index] for index in indices]).cpu(), strict=True):
                hosted[index] = row
        copies = [self._copies({"": vector.detach()}) for vector in hosted]
        return [NamedTensors(self._layout, copy[""], copy) for copy in copies]
