# SPDX-License-Identifier: Apache-2.0
"""A transmitted model as a PyTorch module: its parameters by name, without a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from fedvitals.hosts.array_models import Values


class Outline(nn.Module):
    """A model of which only names and values are known, in transport order."""

    def __init__(self, model: Mapping[str, Values]) -> None:
        super().__init__()
        tensors = {name: torch.from_numpy(values.copy()) for name, values in model.items()}
        self._values = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._values.items()

    def fits(self, model: Mapping[str, Values]) -> bool:
        """Return whether a model has the same names and shapes."""
        return {n: p.shape for n, p in self._values.items()} == {n: v.shape for n, v in model.items()}

    def load(self, model: Mapping[str, Values]) -> None:
        """Copy a model's values into this outline."""
        for parameter, values in zip(self._values.values(), model.values(), strict=True):
            np.copyto(parameter.data.numpy(), values, casting="same_kind")
