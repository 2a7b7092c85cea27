# SPDX-License-Identifier: Apache-2.0
"""A device that is none: CPU tensors that say they lie elsewhere, and refuse what a GPU's would refuse.

So a machine without a GPU finds where such a tensor meets one of the CPU, and counts how often somebody waits for it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fedvitals.lab.engines.engine import Engine

CPU = torch.device("cpu")
DEVICE = torch.device("xla:0")  # of no build of ours: who really goes there fails
READS = {"item", "tolist", "equal", "allclose", "__bool__", "__float__", "__int__", "__index__", "nonzero", "unique"}
REFUSED = {"numpy", "__array__"}
MIXING = {"copy_", "__getitem__", "__setitem__", "index_put_"}  # copies between devices, and indices of the CPU


class DeviceTensor(Tensor):
    """On the pretended device; `waits` counts by operation how often its values were asked for."""

    waits: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})


class Pretending(TorchFunctionMode):
    """Inside, tensors can be made on the pretended device, and moved there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})


def away(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(DeviceTensor)


def on_device(model: nn.Module) -> nn.Module:
    """The model, its parameters on the pretended device."""
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            own = away(parameter.detach().clone())
            with torch._C.DisableTorchFunction():  # whose results are views, and a parameter must not be one
                own.requires_grad_()
                own._is_param = True
            setattr(module, name, own)
    return model


def here(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor)


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return _answer(func, getattr(func, "__name__", ""), args, kwargs)


def _answer(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    absent = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    if name == "__get__" and absent and func in (Tensor.device.__get__, Tensor.is_cpu.__get__):
        return DEVICE if func == Tensor.device.__get__ else False
    if name in ("cpu", "to") or kwargs.get("device") is not None:
        return _moved(func, name, args, kwargs, absent)
    if not absent:
        return func(*args, **kwargs)
    if name in REFUSED:
        raise TypeError(f"{name} of a tensor on {DEVICE}: copy it to the CPU first.")
    strange = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor) and tensor.dim()]
    if strange and name not in MIXING:
        raise RuntimeError(f"{name}: a tensor on {DEVICE} meets one of {[*strange[0].shape]} on the CPU.")
    at_home = name in MIXING and not isinstance(args[0], DeviceTensor)
    if name in READS or at_home:
        DeviceTensor.waits["copy home" if at_home else name] += 1
    return _placed(func(*args, **kwargs), torch.device("cpu") if at_home else DEVICE)


def _moved(func: Any, name: str, args: Any, kwargs: Any, absent: list[Any]) -> Any:
    """A copy to another device, or a tensor that is made on one."""
    now = DEVICE if absent and args and isinstance(args[0], DeviceTensor) else CPU
    given = [CPU] if name == "cpu" else [*args[1:], *kwargs.values()] if name == "to" else [kwargs["device"]]
    wanted = next((place for one in given if (place := _place(one)) is not None), now)
    if now == DEVICE and wanted.type == "cpu":
        DeviceTensor.waits["copy home"] += 1
    args, kwargs = tree_map(lambda leaf: CPU if isinstance(leaf, torch.device) else leaf, (args, kwargs))
    result = func(*args, **kwargs)
    return _placed(result.clone() if name in ("cpu", "to") and wanted.type != now.type else result, wanted)


def _place(value: Any) -> torch.device | None:
    if isinstance(value, Tensor):
        return DEVICE if isinstance(value, DeviceTensor) else CPU
    return torch.device(value) if isinstance(value, str | torch.device) else None


def _placed(result: Any, device: torch.device) -> Any:
    kind = DeviceTensor if device.type == DEVICE.type else Tensor

    def put(value: Any) -> Any:
        return value.as_subclass(kind) if type(value) in (Tensor, DeviceTensor) else value

    if type(result).__module__ == "torch.return_types":
        return type(result)([put(value) for value in result])
    return tree_map(put, result)


class PretendedEngine:
    """The stacked engine; the states that it gives, and wants, lie on the pretended device."""

    device = DEVICE

    def __init__(self, site: Any) -> None:
        self._engine = Engine(site, "stacked", workers=1)
        self.name = self._engine.name

    def train(self, tasks: Any, observer: Any, absorb: Any = None) -> Any:
        assert all(isinstance(task.start, DeviceTensor) for task in tasks)
        plain = [dataclasses.replace(task, start=here(task.start)) for task in tasks]
        for batch in self._engine.train(plain, observer, absorb):
            for update in batch:
                update.state, update.start = away(update.state), away(update.start)
            yield batch

    def evaluate(self, state: Tensor, attack: int | None = None) -> tuple[Tensor, Tensor]:
        assert isinstance(state, DeviceTensor)
        return self._engine.evaluate(here(state), attack)

    def evaluate_locally(self, states: dict[str, Tensor], round_index: int, homes: Any = None) -> tuple[Tensor, Tensor]:
        assert all(isinstance(state, DeviceTensor) for state in states.values())
        states = {node: here(state) for node, state in states.items()}
        return self._engine.evaluate_locally(states, round_index, homes)

    def optimizers(self) -> dict[str, Tensor]:
        return {name: away(tensor) for name, tensor in self._engine.optimizers().items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
