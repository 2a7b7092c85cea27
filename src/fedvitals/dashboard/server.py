# SPDX-License-Identifier: Apache-2.0
"""Serves the dashboard: chooses address and port, creates its token, opens a browser, and ends cleanly."""

from __future__ import annotations

import contextlib
import errno
import gc
import html
import ipaddress
import os
import re
import secrets
import socket
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.connections import Limits, server_of
from fedvitals.errors import ConfigError
from fedvitals.resources.memory import use_one_heap

PORT = 8321
NEXT = 20  # ports tried after the usual one
OWN_PATHS = (["api"], ["compare"], ["login"], ["runs"], ["static"])  # of the dashboard itself


@dataclass(frozen=True, slots=True)
class Address:
    """Where the dashboard listens, and the token that it was started with."""

    host: str
    port: int
    token: str
    path: str = "/"  # of the page to open
    root: str = ""  # in front of all paths, as set by a proxy
    is_proxied: bool = False  # whether a proxy serves it to other machines

    @property
    def url(self) -> str:
        """The address that a user opens. The token is after «#»: that part is never sent, and in no log."""
        name = self.host
        if name in ("0.0.0.0", "::"):  # noqa: S104 - checked, not bound
            name = socket.gethostname()
        elif ":" in name:
            name = f"[{name}]"
        back = "" if self.path == "/" else f"&back={quote(self.root + self.path, safe='')}"
        return f"http://{name}:{self.port}{self.root}/login#token={self.token}{back}"

    @property
    def is_private(self) -> bool:
        """Whether reading needs the token, too, because other machines can reach this address."""
        return self.is_proxied or not is_loopback(self.host)


def checked_root(root: str) -> str:
    """Return a path in front of all addresses as "/a/b", or "" for none; ConfigError if it is invalid."""
    plain = "/" + root.strip("/") if root.strip("/") else ""
    if not re.fullmatch(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*", plain) or plain.split("/")[1:2] in OWN_PATHS:
        raise ConfigError(
            f"--root-path is the path that the proxy has for the dashboard, like /fedvitals, got {root[:80]!r}. Its "
            f"parts are of letters, digits and . _ ~ -, and the first is none of {', '.join(p for (p,) in OWN_PATHS)}."
        )
    return plain


def checked_host(name: str) -> str:
    """Return a host name that the dashboard may be called by; ConfigError if it is none, such as an address with //."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]{2,45}", name):
        raise ConfigError(
            "--allow-host is the name under which browsers open the proxy, without scheme and port, like "
            f"lab.example.org; got {name[:80]!r}."
        )
    return name.lower()


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
        if os.name == "posix":  # on Windows other processes could then listen on the same port
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
    root: str = "",
    proxy_hosts: Sequence[str] = (),
    limits: Limits = Limits(),  # noqa: B008 - frozen
    ready: Callable[[Address], None] = lambda _: None,
) -> None:
    """Serve until Ctrl-C. Changes need the token created here and passed to `ready`; from elsewhere, reading does too.

    `root`: the dashboard's path on a proxy. `proxy_hosts`: its host names there; with one, reading needs the token,
    since a proxy on this machine makes all other machines' requests look local.
    """
    root, names = checked_root(root), tuple(map(checked_host, proxy_hosts))
    listener = bind(host, port)
    address = Address(host, listener.getsockname()[1], secrets.token_urlsafe(24), path, root, bool(names))
    # Reading a file or rows needs Python's lock for each piece; by default, a thread that computes keeps it for 5 ms.
    sys.setswitchinterval(0.0005)
    use_one_heap()  # otherwise each thread keeps room for the largest answer that it ever made
    app = create_app(
        store,
        token=address.token,
        private=address.is_private,
        hosts=(host.lower(),),
        proxy_hosts=names,
        root=root,
        limits=limits,
        ahead=True,
    )
    server = server_of(app, limits)

    def tell() -> None:
        until = time.monotonic() + 10
        while not server.started and time.monotonic() < until and not server.should_exit:
            time.sleep(0.02)
        if server.started:
            ready(address)
            if folder is not None:
                open_in_browser(address.url, Path(folder))

    # What the imports created stays for good. Pages create a hundred thousand small objects and free them at once:
    # searching them for cycles after every few hundred took a third of the time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    with tempfile.TemporaryDirectory(prefix="fedvitals-ui-") if open_browser else contextlib.nullcontext() as folder:
        threading.Thread(target=tell, name="dashboard-ready", daemon=True).start()
        server.run(sockets=[listener])


def open_in_browser(url: str, folder: Path) -> None:
    """Open an address that nobody else may see, through a file that redirects to it.

    The arguments of a program, such as those of a browser, are visible to all users of a machine. `folder` is our own.
    """
    file = folder / "open.html"
    target = html.escape(url)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as written:
        written.write(
            f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">'
            f'<title>fedvitals</title><a href="{target}">Open the dashboard</a>'
        )
    webbrowser.open(file.as_uri())
