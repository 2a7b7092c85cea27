# SPDX-License-Identifier: Apache-2.0
"""Finds out where `flwr run` would go: to a remote SuperLink, or to a local one that ours can replace."""

from __future__ import annotations

import contextlib
import socket
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

PORT = "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"  # where `flwr` looks for a local SuperLink, before it starts one
LOCAL = (":local:", ":local-in-memory:")
VALUED = ("--federation", "--run-config", "-c", "--federation-config", "--format")  # options of `flwr run` with a value


def remote_address(arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the address of the SuperLink that `flwr run` with these arguments goes to; None for a local one."""
    home = Path(environment.get("FLWR_HOME") or Path.home() / ".flwr")
    try:
        connections = tomllib.loads((home / "config.toml").read_text(encoding="utf-8")).get("superlink", {})
    except (OSError, ValueError):  # none yet, or one that flwr itself will complain of
        return None
    plain = _positional(arguments)
    named = plain[1] if len(plain) > 1 else connections.get("default")
    chosen = connections.get(named, {})
    address = chosen.get("address") if isinstance(chosen, dict) else None
    return None if address in (None, *LOCAL) else str(address)


def _positional(arguments: Sequence[str]) -> list[str]:
    positional, words = [], iter(arguments)
    for word in words:
        if word in VALUED:
            next(words, None)
        elif not word.startswith("-"):
            positional.append(word)
    return positional


def knows_local() -> bool:
    """Whether this Flower has local SuperLinks that we can replace; older versions run apps as children of `flwr`."""
    from flwr.cli import constant

    return hasattr(constant, "LOCAL_SUPERLINK_HTTP_API_PORT")


def someone_listens(environment: Mapping[str, str]) -> bool:
    """Whether a local SuperLink of Flower's own runs already."""
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection(("127.0.0.1", int(environment.get(PORT) or 39091)), 0.5),
    ):
        return True
    return False
