# SPDX-License-Identifier: Apache-2.0
"""Faults of language models and their adapters.

They strike single clients, while most issues of language models are of the whole federation, so each has the closest
issue of a client. The fault bank's «adapters» plants the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.adapters import A, B
from fedvitals.lab.description import kind_of, require
from fedvitals.lab.faults.fault import Count, Fault, Positive, Share
from fedvitals.lab.losses import IGNORED

if TYPE_CHECKING:
    from fedvitals.lab.local import Local

PADDING = 0  # the token


class _AdapterFault(Fault, frozen=True):
    """Base class of faults that need low-rank adapters."""

    def check_tensors(self, names: tuple[str, ...]) -> None:
        if not any(name.endswith(B) for name in names):
            kind = kind_of(type(self).__name__)
            raise ConfigError(f"The model has no low-rank adapters for {kind}: parameters = {{adapters = ...}}.")


class RankCollapse(_AdapterFault, frozen=True):
    """An adapter that has collapsed to few directions: the others start at 0 and stay there.

    Args:
        rank: The number of directions that are left.
    """

    rank: Count = 1
    issue: ClassVar[str] = "unusual_client"

    def state(self, tensors: Mapping[str, Tensor], stream: torch.Generator) -> None:  # noqa: ARG002
        for name, tensor in tensors.items():
            if name.endswith(A):
                tensor[self.rank :] = 0
            elif name.endswith(B):
                tensor[:, self.rank :] = 0


class AdapterScale(_AdapterFault, frozen=True):
    """A client whose configuration has a different α/r: `factor` times that of the others.

    Args:
        factor: The client's α/r, as a multiple of the others'.
    """

    factor: Positive = 8.0
    issue: ClassVar[str] = "wrong_learning_rate"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.factor != 1, "factor of adapter_scale", self.factor, "another number than 1")

    def scale(self, scale: float) -> float:
        return scale * self.factor


class Forgetting(Fault, frozen=True):
    """A client that learns a few samples by heart and forgets the rest.

    Args:
        samples: How many samples it trains on.
        factor: How many times as many local steps as the others it trains on them.
    """

    samples: Count = 1
    factor: Count = 4
    issue: ClassVar[str] = "unusual_client"

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        rows = torch.arange(len(y)) % self.samples  # it reports as many samples as it has
        return x[rows], y[rows]

    def local(self, settings: Local) -> Local:
        if settings.iterations is not None:
            return msgspec.structs.replace(settings, iterations=settings.iterations * self.factor)
        return msgspec.structs.replace(settings, epochs=(settings.epochs or 1) * self.factor)


def _require_tokens(fault: Fault, x: Tensor, y: Tensor) -> None:
    if x.is_floating_point() or y.shape != x.shape:
        raise ConfigError(f"The fault {kind_of(type(fault).__name__)} needs tokens with a target for each, as in text.")


class Padding(Fault, frozen=True):
    """A client whose texts end with unmasked padding: tokens 0, which it learns to predict.

    Args:
        share: The share of each text that is replaced by padding.
    """

    share: Share = 0.5
    issue: ClassVar[str] = "unusual_client"

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        _require_tokens(self, x, y)
        padded = torch.arange(x.shape[1]) >= round(x.shape[1] * (1 - self.share))
        return x.masked_fill(padded, PADDING), y.masked_fill(padded, PADDING)


class ShortTexts(Fault, frozen=True):
    """Truncated texts: only the beginning of each is left; the rest is padding, which is correctly masked.

    Args:
        share: The share of each text that is left.
    """

    share: Share = 0.1
    issue: ClassVar[str] = "unusual_client"

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        _require_tokens(self, x, y)
        cut = torch.arange(x.shape[1]) >= max(1, round(x.shape[1] * self.share))
        return x.masked_fill(cut, PADDING), y.masked_fill(cut, IGNORED)


FAULTS = (RankCollapse, AdapterScale, Forgetting, Padding, ShortTexts)
