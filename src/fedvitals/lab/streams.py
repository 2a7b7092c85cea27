# SPDX-License-Identifier: Apache-2.0
"""Random streams that depend on their purpose only.

The stream of (seed, purpose, round, node) is the same for any number of processes, order of clients or round of
resumption, so no generator state needs to be saved.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np
import torch


def stream_seed(seed: int, purpose: str, *coordinates: object) -> int:
    """Return 63 bits of a hash of the coordinates, such as (7, "batches", round, node)."""
    text = "/".join(map(str, (seed, purpose, *coordinates))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def stream(seed: int, purpose: str, *coordinates: object) -> torch.Generator:
    """Return a torch generator for these coordinates."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose, *coordinates))


@contextlib.contextmanager
def seeded_torch(seed: int, purpose: str, *coordinates: object) -> Iterator[None]:
    """Seed torch's global generator for these coordinates inside the block, for layers that draw, such as dropout."""
    before = torch.default_generator.get_state()
    # `torch.manual_seed` would touch devices.
    torch.default_generator.manual_seed(stream_seed(seed, purpose, *coordinates))
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def numpy_stream(seed: int, purpose: str, *coordinates: object) -> np.random.Generator:
    """Return a numpy generator for these coordinates."""
    return np.random.default_rng(stream_seed(seed, purpose, *coordinates))
