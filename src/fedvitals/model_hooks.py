# SPDX-License-Identifier: Apache-2.0
"""Hooks on a user's model that cannot harm it, and a quick walk through its tensors.

Failing hooks are removed, and compilers and copies do not see them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - torch.func tells it nowhere else


def can_be_hooked(model: Any) -> bool:
    """Return whether a hook on the model is called and does not cause a recompilation."""
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    return isinstance(model, torch.nn.Module) and not compiled and not isinstance(model, torch.jit.ScriptModule)


def holds_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers of its own: those inside torch.func (grad, vmap) stand for others."""
    return not _is_wrapped(tensor)


def named_members(model: nn.Module, kind: Literal["_parameters", "_buffers"]) -> list[tuple[str, Tensor]]:
    """Return a model's parameters or buffers by name, as `named_parameters()` and `named_buffers()` do.

    It is several times faster: a model is walked a few times for every client and round, and one with adapters has
    hundreds of modules.
    """
    public = kind[1:]
    if getattr(type(model), f"named_{public}") is not getattr(nn.Module, f"named_{public}"):
        return [*getattr(model, f"named_{public}")()]
    members: list[tuple[str, Tensor]] = []
    modules: set[int] = set()
    tensors: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in modules:
            continue
        modules.add(id(module))
        for name, tensor in getattr(module, kind).items():
            if tensor is not None and id(tensor) not in tensors:
                tensors.add(id(tensor))
                members.append((prefix + name, tensor))
        children = module._modules  # noqa: SLF001 - as `named_modules` does
        waiting += [(f"{prefix}{name}.", child) for name, child in [*children.items()][::-1] if child is not None]
    return members


def walked(model: nn.Module) -> list[nn.Module]:
    """Return a model's modules, each once and in no particular order, several times faster than `modules()`."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [child for child in module._modules.values() if child is not None]  # noqa: SLF001
    return [*found.values()]


def hook_passes(model: nn.Module, hook: Hook) -> list[Any]:
    """Call a hook `(module, arguments, named, output)` after each forward pass of a model; returns its handles.

    The module of a trainer (Lightning's) may pass its batches to the one part of it that trains, and not call itself.
    The calls of that part then count, unless they are inside of a call of the whole.
    """
    if not is_of_trainer(model):
        return [model.register_forward_hook(hook, with_kwargs=True)]
    calls: list[bool] = []  # of the whole that are under way: whether each is a forward pass

    def enter(module: nn.Module, *_: Any) -> None:
        calls.append(not isinstance(vars(module).get("forward"), FunctionType))  # Lightning calls its steps like this

    def leave(module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        if calls and calls.pop() and output is not None:
            hook(module, arguments, named, output)

    def of_part(module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        if not any(calls):
            hook(module, arguments, named, output)

    handles: list[Any] = [
        model.register_forward_pre_hook(Hook(enter, hook.failed)),
        model.register_forward_hook(Hook(leave, hook.failed), with_kwargs=True, always_call=True),
    ]
    part = trained_part(model)
    if part is not model:
        handles.append(part.register_forward_hook(Hook(of_part, hook.failed), with_kwargs=True))
    return handles


def is_of_trainer(model: Any) -> bool:
    """Return whether a model is the module of a trainer such as Lightning's, which calls its `training_step`."""
    return callable(getattr(model, "training_step", None))


def trained_part(model: nn.Module) -> nn.Module:
    """Return the only part that trains of a trainer's module, else the model itself."""
    parts = [own for own in model.children() if any(p.requires_grad for p in own.parameters())]
    single = is_of_trainer(model) and len(parts) == 1 and can_be_hooked(parts[0])
    return parts[0] if single and not hasattr(parts[0], "_orig_mod") else model


class Hook:
    """`call` as a hook. If it raises, `failed` is called, and `call` is not called again."""

    def __init__(self, call: Callable[..., None], failed: Callable[[Exception], None]) -> None:
        self._call: Callable[..., None] | None = call
        self.failed = failed

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling() or self._call is None:
            return
        try:
            self._call(*arguments)
        except Exception as error:  # noqa: BLE001 - inside the user's forward pass
            self._call = None
            self.failed(error)

    def __deepcopy__(self, _memo: Any) -> Callable[..., None]:
        return idle

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return (_idle, ())


def idle(*_: Any) -> None:
    """Do nothing: replaces a hook in copies of a model."""


def _idle() -> Callable[..., None]:
    return idle
