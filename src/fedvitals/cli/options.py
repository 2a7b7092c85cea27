# SPDX-License-Identifier: Apache-2.0
"""Options that verbs share, and the common shape of their `--json`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from fedvitals import __version__

F = TypeVar("F", bound=Callable[..., Any])


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
    shape = {"fedvitals": __version__, "verb": verb, "result": _plain(result)}
    click.echo(json.dumps(shape, indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy
        value = value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {"whole" if key is None else str(key): _plain(entry) for key, entry in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(entry) for entry in value]
        case bytes():
            return f"{len(value)} bytes"
    return value
