# SPDX-License-Identifier: Apache-2.0
"""The models of stacked clients: one matrix of states, read as tensors, and applied to all clients' samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedvitals.kernels.cuda.sums import upload
from fedvitals.probes.view import trained_parameters
from fedvitals.stack import Stack
from fedvitals.stats import Array

# Input values that go through the models at a time: a convolution's activations are many times larger.
_TOGETHER = 1 << 20
# On a GPU as many as its free memory holds, up to 10,000 images of 32 × 32. For each input value a ResNet-18 keeps
# 1.5 kB for its way back, the paper's CNN 0.1; what vmap copies, and the way back itself, comes on top.
_TOGETHER_CUDA, _BYTES, _SHARE = 1 << 25, 4096, 0.8


def rows_of(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return these rows of a tensor, without waiting for its device; the tensor itself if they are all."""
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, upload(torch.tensor(rows), tensor.device))


class StackModel:
    """Names, shapes and the forward pass of a stack's module, with the clients' weights in place of its own."""

    def __init__(self, stack: Stack) -> None:
        self.module: nn.Module = stack.module
        held = None if stack.held is None else {*stack.held}
        self.parameters = [(name, p) for name, p in self.module.named_parameters() if held is None or name in held]
        self.buffers = [(name, b) for name, b in self.module.named_buffers() if held is None or name in held]
        self.states: Tensor = stack.states
        self.forward = stack.forward
        self.clients = len(stack.nodes)
        self.sizes = [p.numel() for _, p in self.parameters]
        self.weights = sum(self.sizes)
        # Nobody trains the module itself, so its host may have switched off all gradients: then all count as trained.
        training = {name for name, _ in trained_parameters(self.parameters)}
        self.trained = [name in training for name, _ in self.parameters]
        self._together: int | None = None

    @property
    def matrix(self) -> Tensor:
        """The present weights, [clients, weights]: a view, without buffers."""
        return self.states[:, : self.weights]

    def trained_columns(self, matrix: Tensor) -> Tensor:
        """Return the columns of weights that train, of [clients, weights]; the matrix itself if all of them do."""
        if all(self.trained):
            return matrix
        return torch.cat([part for part, train in zip(self.layers(matrix), self.trained, strict=True) if train], 1)

    def trained_rows(self, matrices: Array) -> Array:
        """Return the rows of layers that train, of [..., layers, columns]."""
        return matrices if all(self.trained) else matrices[..., self.trained, :]

    def layers(self, matrix: Tensor) -> list[Tensor]:
        """Return one [clients, length] for each parameter."""
        return [*matrix.split(self.sizes, dim=1)]

    def tensors(self, clients: slice = slice(None)) -> dict[str, Tensor]:
        """Return parameters and buffers by name, with a leading axis of clients, in their own type."""
        tensors, offset = {}, 0
        states = self.states.detach()[clients]
        for name, like in (*self.parameters, *self.buffers):
            part = states[:, offset : offset + like.numel()].view(len(states), *like.shape)
            tensors[name] = part.to(like.dtype)
            offset += like.numel()
        return tensors

    def buffer_tensors(self) -> list[Tensor]:
        tensors = self.tensors()
        return [tensors[name] for name, _ in self.buffers]

    def together(self, device: torch.device) -> int:
        """Return how many input values fit into memory at a time; determined once, so that all portions are equal."""
        if device.type != "cuda":
            return _TOGETHER
        if self._together is None:
            free = torch.cuda.mem_get_info(device)[0]
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # kept by torch for us
            self._together = min(_TOGETHER_CUDA, int(_SHARE * free) // _BYTES)
        return self._together

    def parts(self, x: Tensor, cost: int = 1) -> Iterator[slice]:
        """Yield the clients in portions that fit into memory. `cost` is the memory relative to one pass."""
        each = max(1, self.together(x.device) // (cost * max(1, x[0].numel())))
        for first in range(0, self.clients, each):
            yield slice(first, min(first + each, self.clients))

    def apply(self, x: Tensor, clients: slice, *, twice: bool = False) -> Any:
        """Return the outputs of these clients' models on their samples, [clients, samples, ...], differentiable in x.

        `twice`: gradients will be differentiated again, which the host's own forward may not support.
        """
        if self.forward is not None and not twice:
            return self.by_host(self.states.detach()[clients], x)

        def client_forward(state: dict[str, Tensor], samples: Tensor) -> Any:
            return functional_call(self.module, state, (samples,))

        return vmap(client_forward, randomness="different")(self.tensors(clients), x)

    def by_host(self, states: Tensor, x: Tensor) -> Tensor:
        """Return the outputs by the host's own forward, in float32 if it computes in half precision."""
        assert self.forward is not None  # noqa: S101 - asked by the caller
        outputs: Tensor = self.forward(states, x)
        return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs

    def own_copy(self) -> nn.Module:
        """Return a module like the stack's, for `load`."""
        return copy.deepcopy(self.module)

    def load(self, module: nn.Module, client: int) -> None:
        """Load one client's state into a copy of the module."""
        with torch.no_grad():
            own = dict((*module.named_parameters(), *module.named_buffers()))
            for name, tensor in self.tensors(slice(client, client + 1)).items():
                own[name].copy_(tensor[0])

    def of_clients(self, rows: Sequence[int]) -> StackModel:
        """Return the models of these clients, with their present states."""
        if len(rows) == self.clients:
            return self
        model = self.with_states(rows_of(self.states.detach(), rows))
        model.clients = len(rows)
        return model

    def with_states(self, states: Tensor) -> StackModel:
        """Return the same models with other states."""
        model = copy.copy(self)
        model.states = states
        return model
