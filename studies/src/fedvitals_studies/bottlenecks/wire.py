# SPDX-License-Identifier: Apache-2.0
"""Messages between the processes of a small real federation: a JSON header and plain bytes, each with its length.

Nothing is unpickled. Sending can be limited to a number of bytes per second, like a slow line.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

from fedvitals.errors import RecordError

LENGTHS = struct.Struct(">II")  # of the header and of the body
LONGEST_HEADER, LONGEST_BODY = 1 << 16, 1 << 26
PACE = 0.01  # seconds between the pieces of a throttled message


def send(line: socket.socket, header: dict[str, Any], body: bytes = b"", bytes_per_second: float | None = None) -> None:
    """Send one message; if throttled, at the speed of such a line."""
    told = json.dumps(header).encode()
    message = LENGTHS.pack(len(told), len(body)) + told + body
    if bytes_per_second is None:
        line.sendall(message)
        return
    piece = max(1, round(bytes_per_second * PACE))
    began = time.perf_counter()
    for first in range(0, len(message), piece):
        due = began + (first + piece) / bytes_per_second
        time.sleep(max(0.0, due - time.perf_counter()))
        line.sendall(message[first : first + piece])


def receive(line: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Return the next message. Raises EOFError if the other side has disconnected."""
    header, body = LENGTHS.unpack(_exactly(line, LENGTHS.size))
    if header > LONGEST_HEADER or body > LONGEST_BODY:
        raise RecordError(f"A message of {header} and {body} bytes was announced: too long for one of this trial.")
    told = json.loads(_exactly(line, header))
    if not isinstance(told, dict):
        raise RecordError("A message's header is no table of names and values.")
    return told, _exactly(line, body)


def _exactly(line: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        more = line.recv(min(count - len(found), 1 << 16))
        if not more:
            raise EOFError
        found += more
    return bytes(found)
