# SPDX-License-Identifier: Apache-2.0
"""Options that verbs share, and the common shape of their `--json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from fedvitals import __version__
from fedvitals.plain_json import PlainJson

F = TypeVar("F", bound=Callable[..., Any])

_PLAIN = PlainJson(
    name=lambda key: "whole" if key is None else str(key),
    unknown=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else value,
)


def store_option(function: F) -> F:
    return click.option(
        "--store",
        metavar="STORE",
        help="The store: a file or postgresql://... Default: FEDVITALS_STORE, else runs.db in this folder.",
    )(function)


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for scripts.")(function)


def print_json(verb: str, result: Any) -> None:
    """Print {"fedvitals": version, "verb": ..., "result": ...}; numbers that are not finite are null."""
    shape = {"fedvitals": __version__, "verb": verb, "result": _PLAIN(result)}
    click.echo(json.dumps(shape, indent=2, ensure_ascii=False, allow_nan=False))
