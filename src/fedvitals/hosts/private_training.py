# SPDX-License-Identifier: Apache-2.0
"""Recognise a model that Opacus trains with differential privacy.

Measurements taken without its noise (loss, accuracy, gradient norms) would reveal what the noise hides.
"""

from __future__ import annotations

from typing import Any

SAMPLE_GRADIENT = "grad_sample"  # the attribute that Opacus adds to each parameter it trains
WRAPPERS = ("AbstractGradSampleModule", "GradSampleModule")


def trains_privately(model: Any) -> bool:
    """Return whether Opacus trains a model, or the model inside a wrapper."""
    if any(kind.__name__ in WRAPPERS for kind in type(model).__mro__):
        return True
    parameters = getattr(model, "parameters", None)
    return callable(parameters) and any(hasattr(parameter, SAMPLE_GRADIENT) for parameter in parameters())
