# SPDX-License-Identifier: Apache-2.0
"""The weights that a client's training starts from, if a loop loads them inside the client's scope.

Parameters are copied when the scope opens. A loop may replace them after that and before its first step:

    with monitor.client(name, model):
        model.load_state_dict(global_model.state_dict())

The copy then holds the client's old model. That is detected by a hook on `load_state_dict` and, before the first step,
by what is visible of the parameters without reading them all (`ParameterSnapshot.is_outdated`). Nothing here waits for
a device; on one, a write through `parameter.data` is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fedvitals.model_hooks import Hook
from fedvitals.probes.snapshot import same_values


def fits(shared: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Return whether a global model has the layers of these parameters, and is not the model they belong to."""
    return (
        len(shared) == len(parameters)
        and all(a.shape == b.shape for a, b in zip(shared, parameters, strict=True))
        and not any(a is b for a, b in zip(shared, parameters, strict=True))
    )


def equals(shared: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool | None:
    """Return whether two models on the CPU have the same values; None on other devices, where a test would wait."""
    if not all(tensor.is_cpu for tensor in (*shared, *parameters)):
        return None
    return all(same_values(a.detach(), b.detach()) for a, b in zip(shared, parameters, strict=True))


def on_load(model: nn.Module, loaded: Callable[[], None], report: Callable[[Exception, str], None]) -> Any:
    """Call `loaded` after each `load_state_dict` of the model, until the returned handle is removed."""
    if not isinstance(model, nn.Module):
        return None
    hook = Hook(lambda _module, _keys: loaded(), lambda error: report(error, "looking at loaded weights"))
    return model.register_load_state_dict_post_hook(hook)
