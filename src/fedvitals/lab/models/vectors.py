# SPDX-License-Identifier: Apache-2.0
"""Networks of dense layers, for samples of any shape but tokens."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict

import msgspec
import torch
from torch import nn

from fedvitals.lab.description import Description, require
from fedvitals.lab.models.description import Shape, refuse_tokens, seeded_globally


class MLP(Description, frozen=True):
    """Dense layers with ReLU between them.

    Args:
        hidden: The widths of the hidden layers.
    """

    hidden: tuple[int, ...] = (64,)

    stackable = True

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "hidden", tuple(self.hidden))
        require(all(width >= 1 for width in self.hidden), "hidden widths of mlp", self.hidden, "at least 1 each")

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        refuse_tokens("mlp", vocabulary)
        layers: dict[str, nn.Module] = OrderedDict(flat=nn.Flatten())
        width = math.prod(shape)
        with seeded_globally(generator):
            for number, outside in enumerate(self.hidden, 1):
                layers[f"dense{number}"] = nn.Linear(width, outside)
                layers[f"relu{number}"] = nn.ReLU()
                width = outside
            return nn.Sequential(OrderedDict(layers, head=nn.Linear(width, classes)))


class Logistic(Description, frozen=True):
    """Multinomial logistic regression: one dense layer that starts at 0."""

    stackable = True

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        del generator  # nothing is drawn
        refuse_tokens("logistic", vocabulary)
        head = nn.utils.skip_init(nn.Linear, math.prod(shape), classes)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        return nn.Sequential(OrderedDict(flat=nn.Flatten(), head=head))


class Autoencoder(Description, frozen=True):
    """Dense layers to a code of few numbers and back, with ReLU between them; for data sets with `reconstruct`.

    Args:
        hidden: The widths of the layers before the code; after it they are mirrored.
        code: The width of the code.
    """

    hidden: tuple[int, ...] = (64,)
    code: int = 8

    stackable = True

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "hidden", tuple(self.hidden))
        require(all(width >= 1 for width in self.hidden), "hidden of autoencoder", self.hidden, "at least 1 each")
        require(self.code >= 1, "code of autoencoder", self.code, "at least 1")

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        refuse_tokens("autoencoder", vocabulary)
        widths = (math.prod(shape), *self.hidden, self.code, *reversed(self.hidden))
        layers: dict[str, nn.Module] = OrderedDict(flat=nn.Flatten())
        with seeded_globally(generator):
            for number, (inside, outside) in enumerate(itertools.pairwise(widths), 1):
                layers[f"dense{number}"] = nn.Linear(inside, outside)
                layers[f"relu{number}"] = nn.ReLU()
            return nn.Sequential(OrderedDict(layers, head=nn.Linear(widths[-1], classes)))
