# SPDX-License-Identifier: Apache-2.0
"""What a probe sees: the model as lists of tensors, and the progress of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedvitals.errors import UnsuitedError
from fedvitals.kernels import is_sharded
from fedvitals.model_hooks import Hook, named_members
from fedvitals.probes.ranks import parameters_of
from fedvitals.probes.snapshot import ParameterSnapshot, shards_of
from fedvitals.records import Layer, LayerTable


class View:
    """A client's model during one round, with the parameters that train (see `trained_parameters`).

    Only the monitor changes it, by setting `step` and `owned`; a probe reads. `owned` lists, per layer, the parameter
    that the current optimiser step acts on, or None: with several optimisers each sees its own part.

    Args:
        model: The client's module.
        round_index: The round.
        node: The client's name.
        data: The client's own samples, or None.
        loss: The loss function, or None.
        trained: Names of parameters that train elsewhere in the federation.
    """

    __slots__ = (
        "_buffers", "data", "frozen", "last_input", "loss", "model", "named_parameters", "node", "owned", "parameters",
        "round", "snapshot", "step",
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        *,
        round_index: int | None = None,
        node: str | None = None,
        data: Any = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        trained: Collection[str] = frozenset(),
    ) -> None:
        """`trained` are names of parameters that train elsewhere in the federation."""
        self.model = model
        everything = parameters_of(model)
        self.named_parameters = trained_parameters(everything, trained)
        watched = {id(parameter) for _, parameter in self.named_parameters}
        self.frozen = [(name, parameter) for name, parameter in everything if id(parameter) not in watched]
        self.parameters: list[Tensor] = [p for _, p in self.named_parameters]
        self.owned: Sequence[Tensor | None] = self.parameters
        self.snapshot: ParameterSnapshot | None = None  # of the parameters, when the scope began
        self.round, self.node, self.step = round_index, node, 0
        self.data, self.loss = data, loss
        self.last_input: Tensor | None = None  # of the last training batch, if a probe needs it and `data` is absent
        self._buffers: list[tuple[str, Tensor]] | None = None

    @property
    def before(self) -> Tensor | None:
        """All parameters in one vector, as of the opening of the client's scope; None if they were not kept."""
        return None if self.snapshot is None else self.snapshot.vector

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients for the next optimiser step; None if a parameter has none or belongs to another optimiser."""
        return [None if p is None else p.grad for p in self.owned]

    @property
    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """The model's buffers with their names, such as batch norm's running statistics."""
        if self._buffers is None:
            self._buffers = named_members(self.model, "_buffers")
        return self._buffers


def trained_parameters(
    parameters: Sequence[tuple[str, Tensor]], elsewhere: Collection[str] = frozenset()
) -> list[tuple[str, Tensor]]:
    """Return the named parameters that train, here or `elsewhere` in the federation; all of them if none does.

    In fine-tuning with adapters nearly all parameters are frozen: they are neither trained nor sent, and measuring them
    would cost more than the training. One frozen by this client only is still exchanged, and included. A model in which
    nothing trains is a container, such as a global model that is only averaged into.
    """
    training = [(name, p) for name, p in parameters if p.requires_grad or name in elsewhere]
    return training or list(parameters)


def table_of(rows: str, tensors: Iterable[tuple[str, Tensor]]) -> LayerTable:
    """Return the layer table of named tensors."""
    return LayerTable(rows, tuple(Layer(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors))


class FlatTensors(list[Tensor]):
    """Tensors that are contiguous in `vector`, not shared with others: flattening them copies nothing."""

    def __init__(self, vector: Tensor, shapes: Sequence[Sequence[int]]) -> None:
        parts = vector.split([math.prod(shape) for shape in shapes])
        super().__init__(part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True))
        self.vector = vector


def flatten(tensors: Sequence[Tensor], room: Tensor | None = None) -> Tensor:
    """Return copies of all tensors in one vector: float64 if any of them is, else float32.

    Of sharded tensors it has the shards of this process. `room`: a vector that may be overwritten, and is returned if
    it has the right length, type and device.
    """
    if not tensors:
        return torch.zeros(0)
    whole = getattr(tensors, "vector", None)  # a `FlatTensors`, or a similar type of a host
    if isinstance(whole, Tensor):
        return whole
    tensors = shards_of(tensors)
    kinds = {t.dtype for t in tensors}
    with torch.no_grad():
        dtype = torch.float64 if torch.float64 in kinds else torch.float32
        parts = [t.reshape(-1).to(dtype) for t in tensors]
        kind = (sum(part.numel() for part in parts), dtype, parts[0].device)
        usable = room is not None and (room.numel(), room.dtype, room.device) == kind
        return torch.cat(parts, out=room if usable else None)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside the block; restores every module's mode and torch's random streams.

    Raises UnsuitedError for a model whose parameters are sharded: its processes exchange them in each pass, and one of
    ours would hang if another process does not make it.
    """
    if is_sharded([parameter for _, parameter in parameters_of(model)]):
        raise UnsuitedError("Nothing is measured by passes of our own: the model is sharded over several processes.")
    modes = [(module, module.training) for module in model.modules()]
    state = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        for module, _ in modes:
            module.training = False  # not eval(): a model's own train() may do more, and would change the training
        yield
    finally:
        for module, training in modes:
            module.training = training
        torch.set_rng_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def evaluation_without_gradients(model: nn.Module) -> Iterator[None]:
    """Like `evaluation_mode`, without gradients."""
    with evaluation_mode(model), torch.no_grad():
        yield


def catch_last_input(view: View, report: Callable[[Exception, str], None]) -> Any:
    """Keep the input of the last training batch, for probes that need samples but have no data."""

    def catch(module: Any, inputs: tuple[Any, ...]) -> None:
        if module.training and inputs and isinstance(inputs[0], Tensor):
            view.last_input = inputs[0]

    return view.model.register_forward_pre_hook(Hook(catch, lambda error: report(error, "catching a batch")))
