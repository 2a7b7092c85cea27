# SPDX-License-Identifier: Apache-2.0
"""Checks of the telemetry that comes with a client's reply, which hold for every host.

It comes from a machine that may lie: everything in it is checked, and only believed about its sender.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedvitals.errors import RecordError
from fedvitals.records import printable
from fedvitals.transport.sender_limits import MESSAGE_BYTES

VERSION = 1
PROCESSORS = 10_000  # more than any machine has
FIELDS = {"version": int, "payload": bytes, "received": float, "replied": float, "started": float, "cpu": float}


def checked_fields(envelope: Mapping[str, Any], kinds: Mapping[str, type], away: float) -> dict[str, Any]:
    """Return an envelope's fields without its version; the times in it are not checked.

    `kinds`: the type of each field; `away`: seconds from the request to the reply, by the server's clock. Raises
    RecordError, which says what is wrong.
    """
    if envelope.get("version") != VERSION:
        version = printable(str(envelope.get("version"))[:40])
        raise RecordError(
            f"Telemetry of version {version}, where {VERSION} is understood: update the older of the two sides."
        )
    wrong = [name for name, kind in kinds.items() if type(envelope.get(name)) is not kind]
    if wrong or len(envelope) != len(kinds):
        raise RecordError(
            f"Telemetry with fields that are missing, too many or of another type: {wrong or 'too many'}."
        )
    if len(envelope["payload"]) > MESSAGE_BYTES:
        raise RecordError(f"Telemetry of {len(envelope['payload'])} bytes, where {MESSAGE_BYTES} are taken at most.")
    if not 0 <= envelope["cpu"] <= PROCESSORS * (away + 1):
        raise RecordError(f"Telemetry with {envelope['cpu']:.3g} s of processor time, which no machine can have.")
    return {name: envelope[name] for name in kinds if name != "version"}
