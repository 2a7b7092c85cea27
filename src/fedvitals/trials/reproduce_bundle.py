# SPDX-License-Identifier: Apache-2.0
"""Results that travel: all of one piece of work in one file, and back into a folder of results."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedvitals.errors import ConfigError
from fedvitals.trials.reproduce_conditions import Condition
from fedvitals.trials.reproduce_results import (
    Result,
    as_json,
    checked,
    keep_pieces,
    pieces_of,
    save,
    shortened,
)

VERSION = 1
PATTERN = "results-*.json.gz"


def described(result: Result, condition: Condition) -> Result:
    """A result with all that there is to know of its condition, as it is kept."""
    return {**result, "series": shortened(result["series"]), "described": dataclasses.asdict(condition)}


def write(path: Path, results: Sequence[Result], piece: tuple[float, float] | None = None) -> None:
    """Whole or not at all; each result with the condition that it is «described» by. `piece`: from when to when."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    content = {"version": VERSION, "piece": piece, "results": [*results]}
    half.write_bytes(gzip.compress(as_json(content).encode(), 6, mtime=0))
    half.replace(path)


def read(path: Path) -> tuple[list[tuple[Condition, Result]], tuple[int, int] | None]:
    """The results in a file, with their conditions, and when they were made; what is not whole is refused."""
    try:
        content: Any = json.loads(gzip.decompress(path.read_bytes()))
        if content["version"] != VERSION:
            raise ConfigError(f"{path} is of version {content['version']}; this is version {VERSION}.")
        found = [(_condition(result["described"]), result) for result in content["results"]]
        told = content.get("piece")
        piece = None if told is None else (int(told[0]), int(told[1]))
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as results of the study: {error!r}.") from None
    return [(condition, checked(result, condition, result["repeat"])) for condition, result in found], piece


def merge(folder: Path, files: Sequence[Path]) -> int:
    """Takes the results of these files into a folder; what it has of the same condition and repeat is replaced."""
    count = 0
    pieces = pieces_of(folder)
    for file in files:
        found, piece = read(file)
        for condition, result in found:
            save(folder, result, condition)
            count += 1
        pieces |= {piece} if piece is not None else set()
    if pieces:
        keep_pieces(folder, pieces)
    return count


def _condition(described: dict[str, Any]) -> Condition:
    return Condition(**{**described, "channels": tuple(described["channels"])})
