# SPDX-License-Identifier: Apache-2.0
"""What all models' descriptions share: their interface, seeded initialisation, and checks of a sample's shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from fedvitals.errors import ConfigError
from fedvitals.lab.description import require

Shape = tuple[int, ...]
"""Of one sample: (channels, height, width), (steps, features), (features,), or (steps,) of tokens."""


class ModelDescription(Protocol):
    """The interface of a model's description."""

    @property
    def stackable(self) -> bool:
        """Whether many clients can be computed at once, with `torch.func.vmap` over their weights."""

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        """Return the module, which outputs logits; its initial weights depend on the generator only."""


@contextmanager
def seeded_globally(generator: torch.Generator) -> Iterator[None]:
    """Draw torch's random numbers from the generator inside the block, and restore the global streams afterwards."""
    seed = int(torch.randint(2**62, (), generator=generator))
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(list(devices), device_type="cuda"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would touch devices that nobody has begun to use
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


def image_shape(kind: str, shape: Shape, vocabulary: int | None) -> tuple[int, int, int]:
    if len(shape) != 3 or vocabulary is not None:
        what = "tokens" if vocabulary is not None else f"of the shape {list(shape)}"
        raise ConfigError(f"The model {kind} cannot take samples that are {what}: it needs [channels, height, width].")
    return shape


def refuse_tokens(kind: str, vocabulary: int | None) -> None:
    if vocabulary is not None:
        raise ConfigError(f"The model {kind} cannot take tokens. Take gpt, transformer, lstm or gru.")


def require_attention(kind: str, width: int, heads: int, layers: int) -> None:
    """Raise ConfigError unless a transformer of this kind can have this width, heads and layers."""
    require(layers >= 1, f"layers of {kind}", layers, "at least 1")
    fits = heads >= 1 and width >= 1 and width % heads == 0
    require(fits, f"width of {kind}", width, f"a multiple of its {heads} heads")
