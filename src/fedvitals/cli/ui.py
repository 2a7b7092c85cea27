# SPDX-License-Identifier: Apache-2.0
"""`fedvitals ui`: the dashboard in a browser."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from fedvitals.cli.options import opened_run, store_option


@click.command()
@click.argument("run", required=False)
@click.option("--port", type=click.IntRange(0, 65535), help="Port.  [default: 8321, or the next that is free]")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; unless it is a loopback address, reading needs the printed token, too.",
)
@click.option(
    "--root-path", default="", metavar="PATH", help="Path under which a reverse proxy serves it, such as /fedvitals."
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Host name under which a reverse proxy serves it; reading then needs the printed token, too. Repeatable.",
)
@click.option("--demo", is_flag=True, help="Open a stored example instead; nothing is trained.")
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@store_option
def command(
    run: str | None,
    port: int | None,
    host: str,
    root_path: str,
    allow_host: tuple[str, ...],
    demo: bool,
    no_open: bool,
    store: str | None,
) -> None:
    """Open the dashboard on a store.

    It shows which run has a problem, which client, since when and why, and where the time went. With RUN, it opens on
    that run. Runs in training are updated live. Ctrl-C stops the dashboard, not the training.
    """
    where: dict[str, Any] = {"host": host, "port": port, "root": root_path, "proxy_hosts": allow_host}
    if not demo:
        show(store, run=run, open_browser=not no_open, **where)
        return
    if store is not None:
        raise click.UsageError("--demo shows its own store; leave out --store.")
    from fedvitals.dashboard.example import unpack

    with tempfile.TemporaryDirectory(prefix="fedvitals-demo-") as folder:
        show(str(unpack(Path(folder))), run=run, open_browser=not no_open, **where)


def show(store: str | None, *, run: str | None = None, open_browser: bool, **where: Any) -> None:
    """Serve until Ctrl-C, and print the address. `where`: host, port, root and names, as `dashboard.server.serve`."""
    from fedvitals.dashboard.run_address import run_page
    from fedvitals.dashboard.server import serve

    path = "/"
    if run is not None:
        with opened_run(store, run) as (_, chosen):
            path = run_page(chosen)

    def ready(address: Any) -> None:
        click.echo(f"fedvitals dashboard: {address.url}")
        if address.is_private:
            click.echo("The address holds the token, shown only now. Anyone who has it may read, tag and delete.")
            if address.is_proxied:
                click.echo("Behind the proxy, put its scheme and name in front: https://NAME/... , the rest stays.")
            else:
                click.echo("It travels unencrypted: across networks that you do not trust, use a tunnel (ssh -L).")
        else:
            click.echo("The address holds the token, which tagging, muting and deleting need. Reading here needs none.")
        click.echo("Ctrl-C ends it.")

    can_open = open_browser and (os.name != "posix" or any(os.environ.get(n) for n in ("DISPLAY", "WAYLAND_DISPLAY")))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that temporary folders are removed
    serve(store, open_browser=can_open, path=path, ready=ready, **where)
