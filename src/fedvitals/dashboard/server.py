# SPDX-License-Identifier: Apache-2.0
"""Serves the dashboard: chooses address and port, demands a token where others can reach it, and ends cleanly."""

from __future__ import annotations

import errno
import gc
import ipaddress
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from fedvitals.dashboard.app import create_app
from fedvitals.errors import ConfigError

PORT = 8321
NEXT = 20  # ports that are tried after the usual one


@dataclass(frozen=True, slots=True)
class Address:
    """Where the dashboard listens."""

    host: str
    port: int
    token: str | None

    @property
    def url(self) -> str:
        """What a person opens. The token stands behind «#»: that part is never sent, and in no log."""
        name = self.host
        if name in ("0.0.0.0", "::"):  # noqa: S104 - asked about, not bound
            name = socket.gethostname()
        elif ":" in name:
            name = f"[{name}]"
        where = f"http://{name}:{self.port}"
        return where if self.token is None else f"{where}/login#token={self.token}"


def is_loopback(host: str) -> bool:
    """Whether the host is this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens; without a port, on the usual one or the next that is free."""
    wanted = [port] if port is not None else [*range(PORT, PORT + NEXT), 0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in wanted:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
        except (OSError, OverflowError) as error:
            listener.close()
            if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"The dashboard cannot listen on '{host}': {error}. Name an address of this machine with --host, "
                    "or leave it out: then only this machine sees it."
                ) from error
            if number == wanted[-1]:
                raise ConfigError(
                    f"The dashboard cannot listen on {host}, port {number}: {error}. Choose another with --port, "
                    "or leave it out: then a free one is found."
                ) from error
        else:
            return listener
    raise AssertionError("there is always a last port")


def serve(
    store: str | Path | None,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    open_browser: bool = False,
    path: str = "/",
    ready: Callable[[Address], None] = lambda _: None,
) -> None:
    """Until Ctrl-C. Any address but this machine's own needs the token that is made here and told to `ready` once."""
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    app = create_app(store, token=token, hosts=(host.lower(),))
    listener = bind(host, port)
    address = Address(host, listener.getsockname()[1], token)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1, lifespan="on"
    )
    server = uvicorn.Server(config)

    def tell() -> None:
        until = time.monotonic() + 10
        while not server.started and time.monotonic() < until and not server.should_exit:
            time.sleep(0.02)
        if server.started:
            ready(address)
            if open_browser:
                webbrowser.open(address.url if token or path == "/" else address.url + path)

    # What the imports left stays for good. Pages make a hundred thousand small objects and let them go at once: looking
    # for rings among them after every few hundred took a third of the time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    threading.Thread(target=tell, name="dashboard-ready", daemon=True).start()
    server.run(sockets=[listener])
