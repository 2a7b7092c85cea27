# SPDX-License-Identifier: Apache-2.0
"""Results of the conditions: one JSON file per condition and repeat, checked when written, and read back as arrays."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvitals.errors import ConfigError, unknown
from fedvitals_studies.reproduce.conditions import BY_NAME, MEASURED, PAPER_CLIENTS, PAPER_ITERATIONS, Condition

Floats = NDArray[np.float64]
Result = dict[str, Any]

FACTS = (
    "condition", "study", "topology", "scenario", "clipped", "repeat", "seed", "dataset", "digest", "clients", "rounds",
    "iterations", "commit", "seconds", "engine", "device", "settings", "series",
)  # fmt: skip
ALWAYS = ("server.accuracy", "server.loss", "aggregated.accuracy", "aggregated.loss")
PER_ROUND = (
    *ALWAYS, "groups", "bytes.server", "bytes.edge", "scale.gsc", "scale.gsc_median", "scale.gsc_spread",
    "scale.zero_samples", "scale.nonfinite_samples", "scale.sensitivity", "nonlinearity.nlc", "gradient.mean",
    "gradient.magnitude", "gradient.full.mean", "gradient.full.magnitude", "scale.gsc_whole", "scale.sensitivity_whole",
    "scale.gsc_exact", "start.test_loss",
)  # fmt: skip
PER_ITERATION = (
    "iteration.loss", "iteration.test_loss", "iteration.difference", "iteration.difference_absolute", "iteration.gsc",
    "iteration.gradient.mean", "iteration.gradient.magnitude", "iteration.gradient.full.mean",
    "iteration.gradient.full.magnitude",
)  # fmt: skip
SERIES = (*PER_ROUND, *PER_ITERATION)
DIGITS = 6  # significant digits kept in files: more than any figure shows, and small changes stay small in git
DIGITS_EACH = 4  # the same for per-iteration series: twenty times as much

KNOWN_GTSRB: tuple[str, ...] = ("889b0b56afdfcb548777a89b123a34b02e9a5bac79bcb7b58948c68667ca1702",)
"""Digests of the complete GTSRB (`lab.data.gtsrb.DIGEST`): whatever else is so called is not what the paper used."""


def checked(result: Result, condition: Condition, repeat: int) -> Result:
    """Return the result if it belongs to this condition: every fact exists, every series has the right length."""
    whose = f"The result of '{condition.name}', repeat {repeat},"
    missing = [fact for fact in FACTS if fact not in result]
    if missing:
        raise ConfigError(f"{whose} lacks {', '.join(missing)}.")
    for fact, expected in (
        ("condition", condition.name), ("repeat", repeat), ("clients", condition.clients),
        ("rounds", condition.rounds), ("dataset", condition.dataset),
    ):  # fmt: skip
        if result[fact] != expected:
            raise ConfigError(f"{whose} says {fact} = {result[fact]!r}; expected {expected!r}.")
    for name in ALWAYS:
        if name not in result["series"]:
            raise ConfigError(f"{whose} lacks the series '{name}'.")
    for name, values in result["series"].items():
        if name not in SERIES:
            raise ConfigError(f"{whose} has a series that nothing draws. {unknown('series', name, SERIES)}")
        length = result["rounds"] * (result["iterations"] if name in PER_ITERATION else 1)
        for key, part in values.items() if isinstance(values, Mapping) else [("", values)]:
            if len(part) != length:
                label = f"{name}/{key}" if key else name
                raise ConfigError(f"{whose} has {len(part)} values of '{label}'; expected {length}.")
    return result


def beginning(result: Result, condition: Condition) -> Result:
    """Return the first rounds of a longer run, as the shorter run that they are."""
    rounds, iterations = condition.rounds, result["iterations"]

    def cut(name: str, values: Any) -> Any:
        if isinstance(values, Mapping):
            return {key: cut(name, part) for key, part in values.items()}
        return list(values)[: rounds * (iterations if name in PER_ITERATION else 1)]

    return {
        **result,
        "condition": condition.name,
        "study": condition.study,
        "rounds": rounds,
        "seconds": result["seconds"] * rounds / result["rounds"],
        "settings": condition.settings,
        "beginning_of": result["condition"],
        "series": {name: cut(name, values) for name, values in result["series"].items()},
    }


def save(folder: Path, result: Result, condition: Condition) -> Path:
    """Write atomically, so that a killed run leaves no incomplete file."""
    path = file_of(folder, condition.name, result["repeat"])
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {**result, "series": shortened(result["series"]), "described": dataclasses.asdict(condition)}
    half = path.with_suffix(".half")
    half.write_text(as_json(described), encoding="utf-8")
    os.replace(half, path)  # noqa: PTH105 - the atomic one, explicitly
    return path


def shortened(series: Mapping[str, Any]) -> dict[str, Any]:
    """Return the series with the stored number of digits."""
    return {name: _short(values, DIGITS_EACH if name in PER_ITERATION else DIGITS) for name, values in series.items()}


def as_json(value: Any) -> str:
    """Return JSON with six significant digits, null for what is not finite, and a list of numbers on one line."""
    return _written(_short(value), "") + "\n"


def _short(value: Any, digits: int = DIGITS) -> Any:
    match value:
        case bool() | int() | str() | None:
            return value
        case float():
            return float(f"{value:.{digits}g}") if math.isfinite(value) else None
        case Mapping():
            return {str(key): _short(entry, digits) for key, entry in value.items()}
        case np.ndarray() | np.generic():
            return _short(value.tolist(), digits)
    return [_short(entry, digits) for entry in value]


def _written(value: Any, indent: str) -> str:
    if isinstance(value, dict) and value:
        deeper = indent + " "
        entries = (f"{deeper}{json.dumps(key)}: {_written(entry, deeper)}" for key, entry in value.items())
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def spent(folder: Path, device: str) -> tuple[float, int]:
    """Return the seconds of a device for all runs there, and their number; the beginning of another run costs nothing.

    If runs came in pieces, some of which shared the device, it is the time in which any of them was active.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "results").glob("*.json"))]
    own = [run["seconds"] for run in found if run["device"] == device and "beginning_of" not in run]
    return (busy(pieces_of(folder)) or sum(own)) if own else 0.0, len(own)


def busy(pieces: Iterable[tuple[int, int]]) -> float:
    """Return the seconds in which any piece was active."""
    total, until = 0.0, 0.0
    for began, ended in sorted(pieces):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def pieces_of(folder: Path) -> set[tuple[int, int]]:
    """Return the beginning and end of each merged piece, in seconds of the other machine's clock."""
    path = folder / "pieces.json"
    return {(began, ended) for began, ended in json.loads(path.read_text("utf-8"))} if path.exists() else set()


def keep_pieces(folder: Path, pieces: Iterable[tuple[int, int]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pieces.json").write_text(json.dumps(sorted(pieces)) + "\n", encoding="utf-8")


def file_of(folder: Path, name: str, repeat: int) -> Path:
    return folder / "results" / f"{name}.{repeat}.json"


def load(folder: Path, condition: Condition, repeat: int) -> Result | None:
    """Return earlier measurements, or None. Another size or other settings are refused and left as they are."""
    path = file_of(folder, condition.name, repeat)
    if not path.exists():
        return None
    try:
        result: Result = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} cannot be read ({error}). Delete it to have the condition measured again.") from None
    before, now = result.get("described", {}), json.loads(json.dumps(dataclasses.asdict(condition)))
    plain = json.loads(json.dumps(dataclasses.asdict(Condition("", ""))))  # an older file lacks later additions
    before = {**plain, **before} if before else before
    enough = {name for name in MEASURED if before.get(name) and not now[name]}
    other = [
        f"{name} = {before.get(name)!r}, now {now[name]!r}"
        for name in now
        if before.get(name) != now[name] and name not in enough
    ]
    if other:
        raise ConfigError(f"{path} was measured with {'; '.join(other)}. Name another --out, or delete it.")
    return checked(result, condition, repeat)


class Results:
    """The results of one folder: the existing repeats, and their series."""

    def __init__(self, measured: Iterable[Result] = (), pieces: Iterable[tuple[int, int]] = ()) -> None:
        self.pieces = sorted(pieces)  # in which the work was done on a lent machine
        self._found: dict[str, dict[int, Result]] = {}
        for result in measured:
            self._found.setdefault(result["condition"], {})[result["repeat"]] = result

    @classmethod
    def read(cls, folder: Path, conditions: Iterable[Condition]) -> Results:
        """Read all results of these conditions, however many repeats each has."""
        found = []
        for condition in conditions:
            for path in sorted((folder / "results").glob(f"{condition.name}.*.json")):
                result = load(folder, condition, int(path.name.split(".")[-2]))
                found += [result] if result else []
        return cls(found, pieces_of(folder))

    def __contains__(self, condition: object) -> bool:
        return condition in self._found

    @property
    def conditions(self) -> tuple[str, ...]:
        return tuple(self._found)

    def of(self, condition: str) -> list[Result]:
        """Return its repeats, in order."""
        return [result for _, result in sorted(self._found.get(condition, {}).items())]

    def all(self) -> list[Result]:
        return [result for condition in self._found for result in self.of(condition)]

    def repeats(self, condition: str, name: str | None = None, key: str | None = None) -> tuple[int, ...]:
        """Return its repeats; with a name, those that have the series."""
        there = sorted(self._found.get(condition, {}).items())
        if name is None:
            return tuple(repeat for repeat, _ in there)
        series = [(repeat, run["series"].get(name)) for repeat, run in there]
        return tuple(repeat for repeat, values in series if values and (key is None or key in values))

    def has(self, condition: str, name: str, key: str | None = None) -> bool:
        """Whether some repeat has the series, with at least one number in it."""
        if not self.repeats(condition, name, key):
            return False
        return bool(np.isfinite(self.stack(condition, name, key)).any())

    def array(self, condition: str, name: str, key: str | None = None, repeat: int = 0) -> Floats:
        """Return one repeat's series: [points]; for one that has parts, without a key: [parts, points]."""
        values = self._found[condition][repeat]["series"][name]
        if isinstance(values, Mapping):
            values = values[key] if key is not None else [values[part] for part in values]
        return np.array(values, dtype=np.float64)  # null becomes NaN

    def stack(self, condition: str, name: str, key: str | None = None) -> Floats:
        """Return all repeats that have the series: [repeats, points]."""
        return np.stack([self.array(condition, name, key, repeat) for repeat in self.repeats(condition, name, key)])

    def keys(self, condition: str, name: str) -> tuple[str, ...]:
        """Return the parts of a series: layers or edges."""
        found = [run["series"].get(name) for run in self.of(condition)]
        return next((tuple(values) for values in found if isinstance(values, Mapping)), ())


def objections(results: Iterable[Result]) -> list[str]:
    """Return why these are no reproduction of the paper; empty if they are: GTSRB whole, 100 clients, the paper's
    rounds.
    """
    found: dict[str, None] = {}
    for result in results:
        paper = BY_NAME.get(result["condition"])
        if result["dataset"] != "gtsrb":
            found[f"the data set is {result['dataset']}, not GTSRB"] = None
        elif result["digest"] not in KNOWN_GTSRB:
            found[f"the digest of the data, {str(result['digest'])[:12]}…, is not that of the whole GTSRB"] = None
        if result["clients"] != PAPER_CLIENTS:
            found[f"{result['clients']} clients, not {PAPER_CLIENTS}"] = None
        if paper is None:
            found[f"'{result['condition']}' is no condition of the study"] = None
        elif result["rounds"] != paper.rounds:
            found[f"{result['rounds']} rounds, not {paper.rounds}"] = None
        if result["iterations"] != PAPER_ITERATIONS:
            found[f"{result['iterations']} local iterations, not {PAPER_ITERATIONS}"] = None
    return list(found)
