# SPDX-License-Identifier: Apache-2.0
"""Probes measure a model at one moment of training: functions from a `View` to numbers, and presets made of them.

    fv.Monitor(probes="standard")
    fv.Monitor(probes=["light", (fv.probes.gradient_sums, fv.every(5)), fv.probes.gradient_scale(images=64)])

A probe of your own is any function of a `View`. Names load on first use; all but the presets need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedvitals.probes.activations import activations as activation_sums
    from fedvitals.probes.full_gradient import full_gradient as full_gradient_sums
    from fedvitals.probes.gradients import gradient_histogram as gradient_histogram
    from fedvitals.probes.gradients import gradients as gradient_sums
    from fedvitals.probes.gradients import last_gradient as last_gradient
    from fedvitals.probes.layer_scale import layer_pair_scale as layer_pair_scale
    from fedvitals.probes.layer_scale import layer_scale as gradient_scale_between
    from fedvitals.probes.nonlinearity import nonlinearity as nonlinearity_coefficient
    from fedvitals.probes.presets import Planned as Planned
    from fedvitals.probes.presets import Preset as Preset
    from fedvitals.probes.presets import preset as preset
    from fedvitals.probes.scale import scale as gradient_scale
    from fedvitals.probes.view import View as View
    from fedvitals.probes.weights import weights as weight_sums

# Where each name is defined, as «module:name». A probe that is named like its module has another name here: once the
# module is loaded, `fedvitals.probes.weights` is the module.
_HOME = {
    "Planned": "presets:Planned",
    "Preset": "presets:Preset",
    "View": "view:View",
    "activation_sums": "activations:activations",
    "full_gradient_sums": "full_gradient:full_gradient",
    "gradient_histogram": "gradients:gradient_histogram",
    "gradient_scale": "scale:scale",
    "gradient_scale_between": "layer_scale:layer_scale",
    "gradient_sums": "gradients:gradients",
    "last_gradient": "gradients:last_gradient",
    "layer_pair_scale": "layer_scale:layer_pair_scale",
    "nonlinearity_coefficient": "nonlinearity:nonlinearity",
    "preset": "presets:preset",
    "weight_sums": "weights:weights",
}

__all__ = [
    "Planned",
    "Preset",
    "View",
    "activation_sums",
    "full_gradient_sums",
    "gradient_histogram",
    "gradient_scale",
    "gradient_scale_between",
    "gradient_sums",
    "last_gradient",
    "layer_pair_scale",
    "nonlinearity_coefficient",
    "preset",
    "weight_sums",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedvitals.probes' has no attribute '{name}'. It offers: {', '.join(_HOME)}.")
    module, _, attribute = _HOME[name].partition(":")
    try:
        globals()[name] = public = getattr(importlib.import_module(f"fedvitals.probes.{module}"), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        from fedvitals.errors import MissingExtraError  # noqa: PLC0415 - nothing is loaded before it is needed

        raise MissingExtraError("torch", "torch", f"fedvitals.probes.{name}") from error
    return public


def __dir__() -> list[str]:
    return sorted(__all__)
