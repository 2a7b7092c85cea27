# SPDX-License-Identifier: Apache-2.0
"""The deflated direction of a random projection, for many small matrices at once.

`scale` explains the method. With G = W·Wᵀ and z = (I − u·uᵀ)·r, r of independent signs, E[zᵀGz] = tr G − uᵀGu for every
unit vector u. So a direction that only approximates the leading eigenvector causes no bias, as long as these two
numbers are those of the direction itself: its quality only affects the variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The 256th power of G: of an eigenvalue 2 % below the largest, 0.6 % remain.
_SQUARINGS = 8
_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Direction:
    """For each client: a unit vector u, [clients, outputs] in float64, uᵀGu and tr G − uᵀGu, [clients, 1]."""

    u: Tensor
    along: Tensor
    rest: Tensor


def by_decomposition(gram: Tensor) -> Direction:
    """Return the leading eigenvector as u, in full precision. Computed on the host, which synchronises with a GPU."""
    values, vectors = torch.linalg.eigh(gram)
    return Direction(vectors[:, :, -1], values[:, -1:], values[:, :-1].sum(1, keepdim=True))


def by_squaring(gram: Tensor) -> Direction:
    """Return a column of G's 256th power as u, computed with products alone, which never wait for a device.

    cuSOLVER takes 8 ms for each matrix of 43 × 43, and checks the result on the host.
    """
    power = gram
    for number in range(_SQUARINGS):
        if number % 4 == 0:  # then its largest eigenvalue lies between 1/√outputs and 1: no 16th power is too small
            power = power / torch.linalg.matrix_norm(power, keepdim=True).clamp_min(_TINY)
        power = power @ power
    longest = torch.linalg.vector_norm(power, dim=1).argmax(1)
    u = power.gather(2, longest[:, None, None].expand(-1, power.shape[1], 1)).squeeze(2)
    u = u / torch.linalg.vector_norm(u, dim=1, keepdim=True).clamp_min(_TINY)  # for G = 0: u = 0, nothing is left out
    along = ((gram @ u[:, :, None]).squeeze(2) * u).sum(1, keepdim=True)
    return Direction(u, along, gram.diagonal(dim1=1, dim2=2).sum(1, keepdim=True) - along)
