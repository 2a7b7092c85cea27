# SPDX-License-Identifier: Apache-2.0
"""Stacked clients' models: one matrix of states, read as tensors, and applied to all the clients' samples at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedvitals.protocols import Stack

# Input values that go through the models at a time, by device: a convolution's activations are many times larger.
_TOGETHER = {"cpu": 1 << 20, "cuda": 1 << 25}


class StackModel:
    """Names, shapes and the forward pass of a stack's module, with the clients' own numbers in place of its own."""

    def __init__(self, stack: Stack) -> None:
        self.module: nn.Module = stack.module
        self.parameters = [*self.module.named_parameters()]
        self.buffers = [*self.module.named_buffers()]
        self.states: Tensor = stack.states
        self.clients = len(stack.nodes)
        self.sizes = [p.numel() for _, p in self.parameters]
        self.weights = sum(self.sizes)
        trained = [p.requires_grad for _, p in self.parameters]
        # Nobody trains the module itself, so its host may have switched off all gradients: then that says nothing.
        self.trained = trained if any(trained) else [True] * len(trained)

    @property
    def matrix(self) -> Tensor:
        """[clients, weights] as they are now: a view, without buffers."""
        return self.states[:, : self.weights]

    def layers(self, matrix: Tensor) -> list[Tensor]:
        """One [clients, length] for each parameter."""
        return [*matrix.split(self.sizes, dim=1)]

    def tensors(self, clients: slice = slice(None)) -> dict[str, Tensor]:
        """Parameters and buffers by name, with a leading axis of clients; of their own type."""
        found, offset = {}, 0
        states = self.states.detach()[clients]
        for name, like in (*self.parameters, *self.buffers):
            part = states[:, offset : offset + like.numel()].view(len(states), *like.shape)
            found[name] = part.to(like.dtype)
            offset += like.numel()
        return found

    def buffer_tensors(self) -> list[Tensor]:
        found = self.tensors()
        return [found[name] for name, _ in self.buffers]

    def parts(self, x: Tensor) -> Iterator[slice]:
        """The clients in portions that fit into memory."""
        each = max(1, _TOGETHER.get(x.device.type, 1 << 20) // max(1, x[0].numel()))
        for first in range(0, self.clients, each):
            yield slice(first, min(first + each, self.clients))

    def apply(self, x: Tensor, clients: slice) -> Any:
        """The outputs of these clients' models on their own samples, [clients, samples, ...]."""

        def one(state: dict[str, Tensor], samples: Tensor) -> Any:
            return functional_call(self.module, state, (samples,))

        return vmap(one, randomness="different")(self.tensors(clients), x)

    def own_copy(self) -> nn.Module:
        """A module like the stack's, for `load`."""
        return copy.deepcopy(self.module)

    def load(self, module: nn.Module, client: int) -> None:
        """One client's state into a copy of the module."""
        with torch.no_grad():
            state = self.tensors(slice(client, client + 1))
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensor.copy_(state[name][0])
