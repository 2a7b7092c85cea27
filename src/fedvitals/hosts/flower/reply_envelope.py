# SPDX-License-Identifier: Apache-2.0
"""The telemetry record inside a client's reply: one ConfigRecord with our wire bytes and a few times.

It comes from a machine that may lie: everything in it is checked, and only believed about its sender. Requests are
never changed. What both sides must know is derived from what Flower gives both: the ids of run and message.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message

from fedvitals.errors import RecordError
from fedvitals.hosts.envelope_checks import FIELDS, VERSION, checked_fields
from fedvitals.resources.clocks import LATEST

KEY = "fedvitals"  # of the record in a reply
ROUND_KEYS = ("server-round", "server_round", "current_round")
EMPTY_PAYLOAD = b"\0"  # for an empty payload: Flower fails to count the bytes of a record with an empty value


@dataclass(frozen=True, slots=True)
class ReplyEnvelope:
    """The telemetry of one reply.

    Times are the client's own, since the epoch; `cpu`: processor seconds of its handler.
    """

    payload: bytes
    received: float
    replied: float
    started: float  # of its process
    cpu: float

    @property
    def is_dated(self) -> bool:
        """Whether its times lie between 1970 and 2099."""
        return all(0 <= t <= LATEST for t in (self.received, self.replied, self.started))

    def record(self) -> ConfigRecord:
        """Return the envelope as a record for the reply."""
        own: dict[str, Any] = {name: getattr(self, name) for name in FIELDS if name != "version"}
        return ConfigRecord({"version": VERSION, **own, "payload": self.payload or EMPTY_PAYLOAD})


def bytes_of(content: Mapping[str, Any]) -> int:
    """Return the bytes of a message's records, as counted by Flower; Flower fails if a text or a list is empty."""
    return sum(_bytes_of(record) for record in content.values())


def _bytes_of(record: Any) -> int:
    try:
        return int(record.count_bytes())
    except (ValueError, IndexError):
        sizes = (len(value) if isinstance(value, str | bytes) else 8 for value in record.values())
        return sum(map(len, record)) + sum(sizes)


def read_envelope(record: Any, source: int, node: str, away: float) -> ReplyEnvelope:
    """Return the envelope of a reply, whose times are not checked yet. Raises RecordError saying what is wrong with it.

    `source`: the node that sent the reply, by Flower's metadata; `node`: the one that was asked; `away`: seconds from
    the request to the reply, by the server's clock.
    """
    if node_name(source) != node:
        raise RecordError(f"The reply comes from node {source}, and node {node} was asked.")
    if not isinstance(record, ConfigRecord):
        raise RecordError(f"Under the key '{KEY}' of a reply lies a {type(record).__name__}, not a ConfigRecord.")
    fields = checked_fields(record, FIELDS, away)
    return ReplyEnvelope(**{**fields, "payload": b"" if fields["payload"] == EMPTY_PAYLOAD else fields["payload"]})


# -- what both sides know -------------------------------------------------------------------------------------------


def node_name(node_id: int) -> str:
    """Return Flower's node id as a name: it is the same for every message, while processes come and go."""
    return str(node_id)


def run_name(run_id: int) -> str:
    """Return a client's name for the run; the server knows it by its id in the store."""
    return f"flower-{run_id}"


def round_of_message(message: Message) -> int | None:
    """Return the round that a message says it belongs to; None if it does not say."""
    for record in message.content.values():
        if isinstance(record, ConfigRecord):
            round_index = next((record[key] for key in ROUND_KEYS if key in record), None)
            if isinstance(round_index, int) and round_index >= 0:
                return round_index
    group = message.metadata.group_id or ""
    return int(group) if re.fullmatch(r"[0-9]{1,9}", group) else None


def trace_id(run_id: int) -> str:
    """Return the trace id of a run."""
    return hashlib.blake2b(f"flower/run/{run_id}".encode(), digest_size=16).hexdigest()


def journey_id(message_id: str) -> str:
    """Return the id of the span of a message's journey to a client and back."""
    return hashlib.blake2b(f"flower/message/{message_id}".encode(), digest_size=8).hexdigest()
