# SPDX-License-Identifier: Apache-2.0
"""Options that verbs share, and the common shape of their `--json`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fedvitals import __version__
from fedvitals.plain_json import PlainJson

if TYPE_CHECKING:
    from fedvitals.store.read.reader import Reader

F = TypeVar("F", bound=Callable[..., Any])

_PLAIN = PlainJson(
    name=lambda key: "whole" if key is None else str(key),
    unknown=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else value,
)


def store_option(function: F) -> F:
    return click.option(
        "--store",
        metavar="STORE",
        help="Store to use: a file or postgresql://... Default: FEDVITALS_STORE, else runs.db in this folder.",
    )(function)


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for scripts.")(function)


def store_options(function: F) -> F:
    """Add --store and --json."""
    return store_option(json_option(function))


def run_options(function: F) -> F:
    """Add the argument RUN, which may be left out, --store and --json; `opened_run` takes all of them."""
    return click.argument("run", required=False)(store_options(function))


@contextlib.contextmanager
def opened_run(store: str | None, run: str | None) -> Iterator[tuple[Reader, str]]:
    """Yield the store, open for the block, and the id of the selected run: given by id, its beginning, or name.

    None is the newest run, which is stated on standard error; ConfigError if the store has no run.
    """
    from fedvitals.store import open_reader
    from fedvitals.store.read import queries

    with open_reader(store) as reader:
        yield reader, newest_run_stated(reader) if run is None else queries.find_run(reader, run)


def newest_run_stated(reader: Reader) -> str:
    """Return the id of the newest run, and state it on standard error; ConfigError if there is none."""
    from fedvitals.errors import ConfigError
    from fedvitals.store.read.runs import newest_run, run_name

    newest = newest_run(reader)
    if newest is None:
        raise ConfigError("The store has no runs yet. `fedvitals demo` makes one.")
    name = "".join(c if c.isprintable() else "?" for c in run_name(reader, newest))
    click.echo(f"No run was named, so this is the newest: {name}, {newest}.", err=True)
    return newest


def print_json(verb: str, result: Any) -> None:
    """Print {"fedvitals": version, "verb": ..., "result": ...}; numbers that are not finite are null."""
    shape = {"fedvitals": __version__, "verb": verb, "result": _PLAIN(result)}
    click.echo(json.dumps(shape, indent=2, ensure_ascii=False, allow_nan=False))
