# SPDX-License-Identifier: Apache-2.0
"""`fedvitals mcp`: read-only tools over a store, for AI agents."""

from __future__ import annotations

import click

from fedvitals.cli.options import store_option
from fedvitals.errors import MissingExtraError


@click.command()
@click.option("--http", is_flag=True, help="Serve by HTTP on this machine instead of standard input and output.")
@click.option("--port", type=click.IntRange(0, 65535), default=8322, show_default=True, help="Port for --http.")
@store_option
def command(http: bool, port: int, store: str | None) -> None:
    """Serve a store to AI agents (Model Context Protocol).

    The twelve tools only read. An agent starts this itself and talks to it on standard input and output: docs/agents.md
    has the settings. With --http it listens on 127.0.0.1 and nowhere else. The agent sees that one store, and no other
    file.
    """
    try:
        from fedvitals.agents import server
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "mcp", "The server for agents") from error
    from fedvitals.agents.documentation import Entry
    from fedvitals.cli.main import VERBS, app
    from fedvitals.store import open_reader

    open_reader(store).close()  # errors of the store are reported here, where the user sees them
    context = click.Context(app)
    verbs = [(name, app.get_command(context, name)) for name in VERBS]
    entries = [Entry("verb", f"fedvitals {name}", " ".join((verb.help or "").split())) for name, verb in verbs if verb]
    if http:
        server.serve_http(store, port, entries, lambda address: click.echo(f"fedvitals tools: {address}", err=True))
    else:
        server.serve_stdio(store, entries)
