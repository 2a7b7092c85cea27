# SPDX-License-Identifier: Apache-2.0
"""Portable results: all of one piece of work in one file, and back into a folder of results."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedvitals.errors import ConfigError, unknown
from fedvitals_studies.packs.unpacked import unpacked
from fedvitals_studies.reproduce.conditions import BY_NAME, SETTLING, Condition
from fedvitals_studies.reproduce.results import (
    Result,
    Results,
    as_json,
    checked,
    keep_pieces,
    pieces_of,
    save,
    shortened,
)

VERSION = 1
PATTERN = "results-*.json.gz"
DONE = "done.json.gz"  # in a pack: what had been run when it was created


def described(result: Result, condition: Condition) -> Result:
    """Return a result with the full description of its condition, as stored."""
    return {**result, "series": shortened(result["series"]), "described": dataclasses.asdict(condition)}


def write(path: Path, results: Sequence[Result], piece: tuple[float, float] | None = None) -> None:
    """Write atomically; each result with the condition that it is «described» by. `piece`: its beginning and end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    content = {"version": VERSION, "piece": piece, "results": [*results]}
    half.write_bytes(gzip.compress(as_json(content).encode(), 6, mtime=0))
    half.replace(path)


def write_done(path: Path, folder: Path, conditions: Sequence[Condition] = SETTLING) -> None:
    """Write a folder's results of the factorial into one file, so that a pack's run does not repeat them."""
    found = Results.read(folder, conditions).all()
    by_name = {condition.name: condition for condition in conditions}
    if found:
        write(path, [described(run, by_name[run["condition"]]) for run in found])


def read(path: Path) -> tuple[list[tuple[Condition, Result]], tuple[int, int] | None]:
    """Return the results in a file, with their conditions, and when they were made; an incomplete file is refused."""
    packed = unpacked(path, "results of the study")
    try:
        content: Any = json.loads(packed)
        if content["version"] != VERSION:
            raise ConfigError(f"{path} is of version {content['version']}; this is version {VERSION}.")
        found = [_checked(result) for result in content["results"]]
        told = content.get("piece")
        piece = None if told is None else (int(told[0]), int(told[1]))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as results of the study: {error!r}.") from None
    return found, piece


def merge(folder: Path, files: Sequence[Path], wanted: Sequence[Condition] | None = None) -> int:
    """Import the results of these files, or folders of them, into a folder, replacing existing ones.

    Either all files can be read and are of the `wanted` conditions' size, or none is imported.
    """
    count = 0
    pieces = pieces_of(folder)
    everything = [(file, *read(file)) for source in files for file in _result_files(source)]
    for file, found, _ in everything:
        for condition, _ in found if wanted is not None else ():
            _of_this_size(file, condition, wanted or ())
    for _, found, piece in everything:
        for condition, result in found:
            save(folder, result, condition)
            count += 1
        pieces |= {piece} if piece is not None else set()
    if pieces:
        keep_pieces(folder, pieces)
    return count


def _of_this_size(file: Path, condition: Condition, wanted: Sequence[Condition]) -> None:
    """Refuse other sizes: a rehearsal must not replace real measurements."""
    expected = {_size(other) for other in wanted if other.name == condition.name}
    if _size(condition) not in expected:
        due = " or ".join(sorted(expected)) or "no such condition"
        raise ConfigError(
            f"{file} has '{condition.name}' with {_size(condition)}; expected {due}. "
            "A rehearsal is merged with --quick, into a folder of its own; the whole study without."
        )


def _size(condition: Condition) -> str:
    return f"{condition.clients} clients, {condition.rounds} rounds, of {condition.dataset}"


def _result_files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    found = sorted(source.glob(PATTERN))
    if not found:
        raise ConfigError(f"There is no {PATTERN} in {source}: name the folder that run.py was given as --out.")
    return found


def _checked(result: Any) -> tuple[Condition, Result]:
    """Return the condition and the result. Name and repeat become a file name: only the study's own are accepted."""
    described = result["described"]
    condition = Condition(**{**described, "channels": tuple(described["channels"])})
    if condition.name not in BY_NAME:
        raise ConfigError(unknown("condition", str(condition.name), BY_NAME))
    repeat = result["repeat"]
    if type(repeat) is not int or repeat < 0:
        raise ConfigError(f"The result of '{condition.name}' is of repeat {repeat!r}; expected a number, 0 or more.")
    return condition, checked(result, condition, repeat)
