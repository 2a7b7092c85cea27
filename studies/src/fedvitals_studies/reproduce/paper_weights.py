# SPDX-License-Identifier: Apache-2.0
"""The paper's exploding and vanishing scenarios for other networks than its own: activations and first weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedvitals.lab.models.blocks import Encoder, Residual

UNIFORM = {"exploding": (8.0, 10.0), "vanishing": (4.0, 7.0)}  # of the paper's convolutions
ACTIVATIONS = {"exploding": nn.ReLU, "vanishing": nn.Tanh}
FUNCTIONS = {nn.ReLU: torch.relu, nn.Tanh: torch.tanh}
HEAD = "head"  # keeps its initialisation, as the paper's dense layer


@dataclass(frozen=True)
class PaperWeights:
    """A model of the lab whose hidden layers begin as the paper's convolutions do in one of its scenarios.

    Every hidden weight matrix or kernel is drawn from U(8, 10) behind ReLU (exploding), or from U(4, 7) behind tanh
    (vanishing); biases begin at 0. Norms, position embeddings and the head stay as they are.
    """

    model: Any
    scenario: str

    @property
    def stackable(self) -> bool:
        return bool(self.model.stackable)

    def build(
        self, shape: tuple[int, ...], classes: int, generator: torch.Generator, vocabulary: int | None = None
    ) -> nn.Module:
        module: nn.Module = self.model.build(shape, classes, generator, vocabulary=vocabulary)
        _replace_activations(module, ACTIVATIONS[self.scenario])
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Conv2d | nn.Linear) and name != HEAD:
                nn.init.uniform_(layer.weight, *UNIFORM[self.scenario], generator=generator)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        return module


def _replace_activations(module: nn.Module, activation: type[nn.Module]) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.ReLU | nn.GELU):
            setattr(module, name, activation())
        else:
            _replace_activations(child, activation)
    if isinstance(module, Residual | Encoder):  # which apply a function, not a module
        module.activation = FUNCTIONS[activation]
