# SPDX-License-Identifier: Apache-2.0
"""The guard on Flower's replies.

    fv.flower.attach(FedAvg(), monitor, guard="drop")

«drop» turns the reply into an error reply, which every strategy leaves out and Flower's own log reports. «fail» ends
the run with an exception that names the client.
"""

from __future__ import annotations

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from fedvitals.errors import FedvitalsError


class NonFiniteUpdateError(FedvitalsError):
    """An update contains NaN or infinity, and the user asked to fail."""


def error_reply_instead(reply: Message, request: Message, why: str) -> Message:
    """Return an error reply in place of a reply: to the strategy, the client failed."""
    error = Error(ErrorCode.UNKNOWN, f"fedvitals left this update out: {why}")
    instead = Message(error, reply_to=request)
    instead.metadata.__dict__["_message_id"] = reply.metadata.message_id
    return instead
