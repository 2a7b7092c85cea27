# SPDX-License-Identifier: Apache-2.0
"""How many bytes of telemetry may be attached to a client's reply."""

from __future__ import annotations

from fedvitals.transport.sender_limits import MESSAGE_BYTES

REPLY_SHARE, SMALLEST_BUDGET = 0.01, 32 << 10  # of the larger of request and reply; and what any reply may carry


def telemetry_budget(message_bytes: int) -> int:
    """Return the bytes of telemetry that a reply may carry. `message_bytes`: of the larger of request and reply."""
    return min(MESSAGE_BYTES, max(SMALLEST_BUDGET, int(REPLY_SHARE * message_bytes)))
