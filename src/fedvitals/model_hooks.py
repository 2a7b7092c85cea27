# SPDX-License-Identifier: Apache-2.0
"""Hooks on a user's model that cannot harm it: failing ones are removed, compilers and copies do not see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def can_be_hooked(model: Any) -> bool:
    """Not where a hook would have the model compiled anew, or is not called."""
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    return isinstance(model, torch.nn.Module) and not compiled and not isinstance(model, torch.jit.ScriptModule)


class Hook:
    """`call` as a hook. Should it raise, `failed` is told, and it is not called again."""

    def __init__(self, call: Callable[..., None], failed: Callable[[Exception], None]) -> None:
        self._call: Callable[..., None] | None = call
        self._failed = failed

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling() or self._call is None:
            return
        try:
            self._call(*arguments)
        except Exception as error:  # noqa: BLE001 - inside the user's forward pass
            self._call = None
            self._failed(error)

    def __deepcopy__(self, _memo: Any) -> Callable[..., None]:
        return idle

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return (_idle, ())


def idle(*_: Any) -> None:
    """What a copy of a model has in a hook's place."""


def _idle() -> Callable[..., None]:
    return idle
