# SPDX-License-Identifier: Apache-2.0
"""Networks for sequences and tokens, which also take images: as patches, or row by row."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from fedvitals.errors import ConfigError
from fedvitals.lab.description import Description, kind_of, require
from fedvitals.lab.models.blocks import (
    ClassToken,
    Encoder,
    FirstStep,
    GatedRecurrent,
    ImageRows,
    MeanOverSteps,
    Patches,
    PositionEmbedding,
    Recurrent,
)
from fedvitals.lab.models.description import Shape, image_shape, require_attention, seeded_globally


class Transformer(Description, frozen=True):
    """A small transformer on image patches, on the steps of sequences, or on tokens; without dropout.

    It answers for the mean of all steps, or for each step where the targets ask for that.

    Args:
        width: The width of the residual stream.
        heads: The number of attention heads in a block.
        layers: The number of blocks.
        patch: Pixels along the side of an image patch.
    """

    width: int = 64
    heads: int = 4
    layers: int = 2
    patch: int = 4

    stackable = True

    def __post_init__(self) -> None:
        require_attention("transformer", self.width, self.heads, self.layers)
        require(self.patch >= 1, "patch of transformer", self.patch, "at least 1 pixel")

    def build(
        self,
        shape: Shape,
        classes: int,
        generator: torch.Generator,
        vocabulary: int | None = None,
        *,
        per_step: bool = False,
    ) -> nn.Module:
        with seeded_globally(generator):
            steps, first = _first_layer("transformer", self.width, self.patch, shape, vocabulary)
            layers: dict[str, nn.Module] = {"embedding": first, "places": PositionEmbedding(steps, self.width)}
            layers |= {f"encoder{number}": Encoder(self.width, self.heads) for number in range(1, self.layers + 1)}
            layers |= {"norm": nn.LayerNorm(self.width)} | ({} if per_step else {"mean": MeanOverSteps()})
            return nn.Sequential(OrderedDict(layers, head=nn.Linear(self.width, classes)))


def _first_layer(kind: str, width: int, patch: int, shape: Shape, vocabulary: int | None) -> tuple[int, nn.Module]:
    """Return the number of steps, and the layer that maps each of them to `width` numbers."""
    if vocabulary is not None:
        return shape[0], nn.Embedding(vocabulary, width)
    if len(shape) == 2:
        return shape[0], nn.Linear(shape[1], width)
    channels, rows, columns = image_shape(kind, shape, None)
    if rows % patch or columns % patch:
        raise ConfigError(f"Patches of {patch} pixels do not fill an image of {rows} × {columns}.")
    return rows * columns // patch**2, Patches(channels, width, patch)


class VIT(Description, frozen=True):
    """A vision transformer (Dosovitskiy et al. 2021): patches behind a class token, from which the answer is read.

    Args:
        width: The width of the residual stream.
        heads: The number of attention heads in a block.
        layers: The number of blocks.
        patch: Pixels along the side of an image patch.
    """

    width: int = 64
    heads: int = 4
    layers: int = 2
    patch: int = 4

    stackable = True

    def __post_init__(self) -> None:
        require_attention("vit", self.width, self.heads, self.layers)
        require(self.patch >= 1, "patch of vit", self.patch, "at least 1 pixel")

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        image_shape("vit", shape, vocabulary)
        with seeded_globally(generator):
            steps, first = _first_layer("vit", self.width, self.patch, shape, None)
            layers: dict[str, nn.Module] = {"embedding": first, "token": ClassToken(self.width)}
            layers["places"] = PositionEmbedding(steps + 1, self.width)
            layers |= {f"encoder{number}": Encoder(self.width, self.heads) for number in range(1, self.layers + 1)}
            layers |= {"norm": nn.LayerNorm(self.width), "first": FirstStep()}
            return nn.Sequential(OrderedDict(layers, head=nn.Linear(self.width, classes)))


class LSTM(Description, frozen=True):
    """A recurrent network on the steps of sequences, on tokens, or on an image's rows from the top.

    It answers for the last step, or for each step where the targets ask for that.

    Args:
        hidden: The width of the state.
        layers: The number of layers, one on top of the other.
    """

    hidden: int = 64
    layers: int = 1

    stackable = False  # torch computes it as one operation, which cannot be batched over weights

    def __post_init__(self) -> None:
        kind = kind_of(type(self).__name__)
        require(self.hidden >= 1, f"hidden width of {kind}", self.hidden, "at least 1")
        require(self.layers >= 1, f"layers of {kind}", self.layers, "at least 1")

    def _recurrent(self, features: int, *, per_step: bool) -> nn.Module:
        return Recurrent(features, self.hidden, self.layers, per_step=per_step)

    def build(
        self,
        shape: Shape,
        classes: int,
        generator: torch.Generator,
        vocabulary: int | None = None,
        *,
        per_step: bool = False,
    ) -> nn.Module:
        with seeded_globally(generator):
            if vocabulary is not None:
                first: nn.Module = nn.Embedding(vocabulary, self.hidden)
                features = self.hidden
            elif len(shape) == 2:
                first, features = nn.Identity(), shape[1]
            else:
                channels, _, width = image_shape(kind_of(type(self).__name__), shape, None)
                first, features = ImageRows(), channels * width
            recurrent = self._recurrent(features, per_step=per_step)
            return nn.Sequential(
                OrderedDict(embedding=first, recurrent=recurrent, head=nn.Linear(self.hidden, classes))
            )


class GRU(LSTM, frozen=True):
    """A recurrent network like `lab.LSTM`, with gated recurrent units.

    Args:
        hidden: The width of the state.
        layers: The number of layers, one on top of the other.
    """

    def _recurrent(self, features: int, *, per_step: bool) -> nn.Module:
        return GatedRecurrent(features, self.hidden, self.layers, per_step=per_step)
