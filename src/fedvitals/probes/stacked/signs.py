# SPDX-License-Identifier: Apache-2.0
"""Random signs for the projections of stacked clients: per client on a CPU, one stream for all on a GPU.

On a CPU a client draws what it would draw alone, so that a stack's estimates equal those of single clients. A hundred
such streams take milliseconds of the host at every step, so a GPU draws all at once, from a stream seeded by all
clients' seeds. The signs differ between the two; their distribution does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Signs(Protocol):
    """Returns [times, clients, samples, outputs] of ±1, for these clients' outputs [clients, samples, outputs]."""

    def __call__(self, outputs: Tensor, clients: slice, times: int) -> Tensor: ...


class HostSigns:
    """Draws each client's signs from its own stream, which restarts with each portion of samples."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds

    def __call__(self, outputs: Tensor, clients: slice, times: int) -> Tensor:
        seeds, shape = self._seeds[clients], outputs.shape[1:]
        bits = torch.empty(times, len(seeds), *shape, dtype=torch.int8)
        stream = torch.Generator()
        for client, seed in enumerate(seeds):
            stream.manual_seed(seed)
            for time in range(times):
                torch.randint(0, 2, shape, generator=stream, dtype=torch.int8, out=bits[time, client])
        return (bits * 2 - 1).to(outputs.device, outputs.dtype)


class DeviceSigns:
    """Draws all clients' signs from one stream on their device, without synchronising or copying."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._stream = torch.Generator(device).manual_seed(joint_seed(seeds))

    def __call__(self, outputs: Tensor, clients: slice, times: int) -> Tensor:  # noqa: ARG002 - the stream goes on
        return _fill(outputs.new_empty(times, *outputs.shape), self._stream)


class BufferedSigns:
    """The same signs as `DeviceSigns`, in fixed buffers that a captured graph reads."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Generator(device)
        self._buffers: list[Tensor] = []
        self._next = 0

    def rewind(self) -> None:
        """Start again with the first buffer, before each pass."""
        self._next = 0

    def __call__(self, outputs: Tensor, clients: slice, times: int) -> Tensor:  # noqa: ARG002 - asked in order
        if self._next == len(self._buffers):
            self._buffers.append(outputs.new_ones(times, *outputs.shape))
        self._next += 1
        return self._buffers[self._next - 1]

    def fill(self, seeds: Sequence[int]) -> None:
        self._stream.manual_seed(joint_seed(seeds))
        for buffer in self._buffers:
            _fill(buffer, self._stream)


def joint_seed(seeds: Sequence[int]) -> int:
    """Return one seed derived from all."""
    return int.from_bytes(hashlib.blake2b(repr([*seeds]).encode(), digest_size=7).digest(), "big")


def _fill(signs: Tensor, stream: torch.Generator) -> Tensor:
    return signs.random_(0, 2, generator=stream).mul_(2).sub_(1)
