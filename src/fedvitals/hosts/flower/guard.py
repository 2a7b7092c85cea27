# SPDX-License-Identifier: Apache-2.0
"""The guard before aggregation: one update with NaN or infinity would silently make the whole model non-finite.

    fv.flower.attach(FedAvg(), monitor, guard="drop")

«report» (the default) changes nothing: the detectors name the client. «drop» turns the reply into an error reply, which
every strategy leaves out and Flower's own log reports. «fail» ends the run with an exception that names the client.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from fedvitals.errors import ConfigError, FedvitalsError, unknown
from fedvitals.hosts.flower.arrays import Values

REPORT, DROP, FAIL = GUARDS = ("report", "drop", "fail")
LAYERS_NAMED = 3  # layers in a sentence


class NonFiniteUpdateError(FedvitalsError):
    """An update contains NaN or infinity, and the user asked to fail."""


def check_guard(guard: str) -> str:
    """Return the guard's name. Raises ConfigError if it is unknown."""
    if guard not in GUARDS:
        raise ConfigError(unknown("guard", str(guard), GUARDS))
    return guard


def nonfinite_words(model: Mapping[str, Values]) -> str | None:
    """Return where a model is not finite, as a part of a sentence; None if it is finite."""
    layers = {name: int((~np.isfinite(values)).sum()) for name, values in model.items()}
    ill = {name: count for name, count in layers.items() if count}
    if not ill:
        return None
    more = f" and {len(ill) - LAYERS_NAMED} more layers" if len(ill) > LAYERS_NAMED else ""
    return f"{sum(ill.values())} values are NaN or infinite, in {', '.join([*ill][:LAYERS_NAMED])}{more}"


def error_reply_instead(reply: Message, request: Message, why: str) -> Message:
    """Return an error reply in place of a reply: to the strategy, the client failed."""
    error = Error(ErrorCode.UNKNOWN, f"fedvitals left this update out: {why}")
    instead = Message(error, reply_to=request)
    instead.metadata.__dict__["_message_id"] = reply.metadata.message_id
    return instead
