# SPDX-License-Identifier: Apache-2.0
"""The guard before aggregation: one update with NaN or infinity would silently make the whole model non-finite.

«report» (the default) changes nothing: the detectors name the client. «drop» leaves the update out, in the way that the
host's framework allows. «fail» ends the run, and names the client.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedvitals.errors import ConfigError, unknown
from fedvitals.hosts.array_models import Values

REPORT, DROP, FAIL = GUARDS = ("report", "drop", "fail")
LAYERS_NAMED = 3  # layers in a sentence


def check_guard(guard: str) -> str:
    """Return the guard's name. Raises ConfigError if it is unknown."""
    if guard not in GUARDS:
        raise ConfigError(unknown("guard", str(guard), GUARDS))
    return guard


def nonfinite_words(model: Mapping[str, Values]) -> str | None:
    """Return where a model is not finite, as part of a sentence; None if it is finite."""
    layers = {name: int((~np.isfinite(values)).sum()) for name, values in model.items()}
    ill = {name: count for name, count in layers.items() if count}
    if not ill:
        return None
    more = f" and {len(ill) - LAYERS_NAMED} more layers" if len(ill) > LAYERS_NAMED else ""
    return f"{sum(ill.values())} values are NaN or infinite, in {', '.join([*ill][:LAYERS_NAMED])}{more}"
