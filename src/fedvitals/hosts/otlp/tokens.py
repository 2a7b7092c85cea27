# SPDX-License-Identifier: Apache-2.0
"""Tokens that identify the senders of an OTLP receiver: one per node, all derived from the receiver's secret.

    token = sender_token(secret, "c7")      # on the server; hand it to c7 and to nobody else

A token names its node and proves it (HMAC-SHA256 of the name under the secret), so a receiver needs no list of senders,
and no sender can create another's token. It is valid as long as the secret is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from fedvitals.protocols import Node
from fedvitals.records import AnyName, node_name

_PURPOSE = b"fedvitals otlp sender\0"


def sender_token(secret: str, node: AnyName) -> str:
    """Return the token with which only this node can report to a receiver with this secret."""
    name = node_name(node)
    encoded = base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")
    return f"{encoded}.{_proof(secret, name)}"


def sender_of(secret: str, token: str) -> Node | None:
    """Return the node that a token belongs to; None if it is not a token of this secret."""
    encoded, _, proof = token.partition(".")
    try:
        name = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    except (binascii.Error, ValueError):
        return None
    return name if name and is_same(proof, _proof(secret, name)) else None


def is_same(text: str, other: str) -> bool:
    """Return whether two texts are equal, in a time that does not reveal where they differ."""
    return hmac.compare_digest(text.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


def _proof(secret: str, name: str) -> str:
    return hmac.new(secret.encode(), _PURPOSE + name.encode(), hashlib.sha256).hexdigest()
