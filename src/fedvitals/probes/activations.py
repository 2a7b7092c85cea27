# SPDX-License-Identifier: Apache-2.0
"""Statistics of each module's output, and its dead or saturated units.

Hooks exist only during scheduled steps, and measure immediately, since an in-place activation would overwrite the
output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedvitals.kernels import sums
from fedvitals.model_hooks import can_be_hooked, holds_numbers
from fedvitals.probes import samples
from fedvitals.probes.view import View, evaluation_without_gradients
from fedvitals.stats import HEALTH_COLUMNS, Array, empty_sums, merge_sums

# Output range that a bounded activation hardly leaves: beyond it, its slope is below 1 % of the largest.
SATURATION: dict[type[nn.Module], tuple[float, float]] = {
    nn.Tanh: (-0.995, 0.995),
    nn.Sigmoid: (0.0025, 0.9975),
    nn.Hardtanh: (-1.0, 1.0),
    nn.ReLU6: (-1.0, 6.0),
}

# Modules whose three-dimensional output is [samples, channels, places].
CHANNELS_FIRST = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d)


def watched_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that compute something themselves: those without children."""
    return [(name or "model", m) for name, m in model.named_modules() if not any(m.children())]


def health(output: Tensor, module: nn.Module) -> Array:
    """Return the numbers of units of an output: all, dead, saturated, of both signs (HEALTH_COLUMNS).

    A unit is a channel of [samples, channels, ...], a feature of [samples, features] and of [samples, places, features]
    (except for the output of a 1-d convolution, pooling or batch norm). Dead: 0 for every sample and place. Saturated:
    beyond the limits of SATURATION for every sample and place. Sign-diverse: positive for some, negative for others.
    """
    units = output.detach()
    if units.dim() > 3 or isinstance(module, CHANNELS_FIRST):
        units = units.transpose(1, -1)
    units = units.reshape(-1, units.shape[-1])
    low, high = units.amin(0), units.amax(0)
    dead = (low == 0) & (high == 0)
    limits = SATURATION.get(type(module))
    saturated = torch.zeros_like(dead)
    if limits is not None:
        saturated = ((units <= limits[0]) | (units >= limits[1])).all(0)
    counts = torch.stack([dead.sum(), saturated.sum(), ((low < 0) & (high > 0)).sum()]).tolist()
    return np.array([float(dead.numel()), *map(float, counts)])


Take = Callable[[], Mapping[str, Any]]
"""Ends what `prepare` began: removes the hooks and returns what they recorded."""


def prepare(view: View, charge: Callable[[Callable[[], None]], None]) -> Take:
    """Register hooks for one step and return the function that removes them.

    `charge` runs a function and counts its time as the probe's cost.
    """
    seen: dict[int, list[tuple[Array, Array]]] = {}
    modules = watched_modules(view.model)

    def hook_for(index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            tensor = output[0] if isinstance(output, tuple) and output else output
            if (
                isinstance(tensor, Tensor)
                and tensor.is_floating_point()
                and tensor.dim() >= 2
                and holds_numbers(tensor)
            ):
                charge(lambda: keep(index, _measure_output(tensor, module)))

        return hook

    def keep(index: int, measured: tuple[Array, Array]) -> None:
        seen.setdefault(index, []).append(measured)

    hooked = enumerate(modules) if can_be_hooked(view.model) else ()
    handles = [module.register_forward_hook(hook_for(i)) for i, (_, module) in hooked]

    def take() -> Mapping[str, Any]:
        for handle in handles:
            handle.remove()
        return _merge_outputs(seen, len(modules)) if seen else {}

    return take


def activations(view: View) -> Mapping[str, Any]:
    """Measure every module's output, on at most 64 of the client's own samples.

    This is the probe as it runs when a scope closes. At scheduled steps the monitor calls `prepare` instead, and
    measures the training's own forward pass without an additional one.

    Args:
        view: The client's model at this moment, and its data.

    Returns:
        {"activation": [modules, 9]}, with the sums of `gradient_sums`, and {"activation.health": [modules, 4]}: units,
        and how many of them are dead, are saturated, or have outputs of both signs; nothing without samples.
    """
    total = 0 if view.data is None else samples.size(view.data)
    if not total:
        return {}
    x, _ = samples.read(view.data, samples.spread_indices(total, 64, 0))
    remove_hooks = prepare(view, lambda measure: measure())
    try:
        with evaluation_without_gradients(view.model):
            samples.apply(view.model, x)
    finally:
        rows = remove_hooks()
    return rows


activations.prepare = prepare  # type: ignore[attr-defined]


def _merge_outputs(seen: Mapping[int, list[tuple[Array, Array]]], count: int) -> Mapping[str, Any]:
    """Return one row per module; outputs of a module that ran twice are merged, and one that did not run is neutral."""
    values, units = empty_sums(count), np.zeros((count, len(HEALTH_COLUMNS)))
    for index, measurements in seen.items():
        values[index] = merge_sums(np.stack([v for v, _ in measurements]))
        units[index] = np.sum([u for _, u in measurements], axis=0)
    return {"activation": values, "activation.health": units}


def _measure_output(tensor: Tensor, module: nn.Module) -> tuple[Array, Array]:
    return np.asarray(torch.as_tensor(sums([tensor.detach()])).cpu())[0], health(tensor, module)
