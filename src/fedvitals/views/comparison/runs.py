# SPDX-License-Identifier: Apache-2.0
"""Compares runs: what changed from the first to the others, whether it can be chance, where they diverge, and why.

A *side* is one run, or several repeats of it: runs with the same name and configuration that only differ in their
seeds.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fedvitals.analysis.traffic import LEVELS
from fedvitals.diagnosis.cases import Case, is_trouble, severity_rank
from fedvitals.errors import ConfigError
from fedvitals.records import Run
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import runs_of_name
from fedvitals.views.comparison.chance import Change, change, pairing
from fedvitals.views.comparison.divergence_point import DivergencePoint, divergence_point
from fedvitals.views.comparison.lab_defaults import DEFAULTS, is_default
from fedvitals.views.run_figures import Figures, figures_of, highest, last, mean

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Value = Callable[[Figures], float | None]


@dataclass(frozen=True, slots=True)
class Side:
    """A run, or several repeats of it."""

    letter: str
    name: str
    runs: tuple[str, ...]  # the newest first
    seeds: tuple[int | None, ...]
    rounds: int
    clients: int
    judged: bool
    verdict: str  # on the newest run


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One number of every side."""

    topic: str  # «learning», «time», «memory», «bytes», «findings»
    name: str
    unit: str
    better: str  # «higher», «lower» or «» for neither
    values: tuple[float | None, ...]  # for each side, a mean over repeats; NaN if one of them is not finite
    changes: tuple[Change | None, ...]  # from the first side to each other one


@dataclass(frozen=True, slots=True)
class Trouble:
    """A case, and which sides have it."""

    issue: str
    place: str
    severity: str
    runs: tuple[int, ...]  # for each side, in how many of its runs


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of every side."""

    name: str
    values: tuple[Any, ...]  # for each side
    defaults: tuple[bool, ...] = ()  # for each side, whether it is the lab's default; empty: unknown

    @property
    def differs(self) -> bool:
        """Whether the sides have different values."""
        return any(repr(value) != repr(self.values[0]) for value in self.values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything known of runs side by side."""

    sides: tuple[Side, ...]
    opening: tuple[ComparisonRow, ...]  # accuracy (loss if there is none), round time and memory
    rows: tuple[ComparisonRow, ...]
    troubles: tuple[Trouble, ...]
    gsc: tuple[Mapping[int, float], ...]  # for each side, by round: median over clients, then over repeats
    layer_pairs: Mapping[str, tuple[Mapping[int, float], ...]]  # the same between two layers, by «upper/lower»
    partings: tuple[DivergencePoint, ...]  # of the first side and each other one
    settings: tuple[Setting, ...]  # in which the sides differ
    confidence: str  # the conclusion, in a sentence


def compare(reader: Reader, runs: Sequence[str], *, repeats: bool = False) -> Comparison:
    """Compare at least two runs, each an id, the beginning of one, or a name."""
    return compared(sides_of(reader, runs, repeats=repeats))


def sides_of(
    reader: Reader,
    runs: Sequence[str],
    *,
    repeats: bool = False,
    figures: Callable[[Reader, str], Figures] = figures_of,
) -> list[list[Figures]]:
    """Read the figures of the given runs, grouped by repeats; `figures`: reads those of one run."""
    groups = grouped([queries.get_run(reader, run) for run in chosen(reader, runs, repeats=repeats)])
    if len(groups) < 2:
        raise ConfigError(
            f"A comparison needs two runs, got {len(groups)} from '{' '.join(runs)}'. Name others: `fedvitals runs`."
        )
    if len(groups) > len(LETTERS):
        raise ConfigError(f"At most {len(LETTERS)} runs side by side, got {len(groups)}.")
    return [[figures(reader, run.id) for run in group] for group in groups]


def compared(sides: Sequence[Sequence[Figures]]) -> Comparison:
    """Compare sides, each the figures of its runs; the first is the baseline."""
    clock = "virtual" if all(f.virtual_seconds for side in sides for f in side) else "real"
    table = [_row(sides, *line) for line in _lines(clock)]
    rows = [row for row in table if any(value is not None for value in row.values)]
    learning = next((row.name for row in rows if row.name in ("accuracy, last", "loss, last")), "")
    opening = [row for row in rows if row.name in (learning, f"round ({clock} clock)", "peak memory")]
    return Comparison(
        tuple(_side(letter, side) for letter, side in zip(LETTERS, sides, strict=False)),
        tuple(opening),
        tuple(rows),
        _troubles(sides),
        tuple(_middle(figures.gsc for figures in side) for side in sides),
        {
            pair: tuple(_middle(figures.layer_pairs.get(pair, {}) for figures in side) for side in sides)
            for pair in sorted({pair for side in sides for figures in side for pair in figures.layer_pairs})
        },
        tuple(divergence_point(sides[0], other) for other in sides[1:]),
        tuple(s for s in all_settings([[f.run for f in side] for side in sides]) if s.differs),
        _confidence(sides, rows),
    )


def chosen(reader: Reader, texts: Sequence[str], *, repeats: bool, most: int | None = None) -> list[str]:
    """Return the ids that a user means. With `repeats`, for each of them all runs with its name and configuration.

    `most`: at most this many for each: the newest and the named one.
    """
    ids = [queries.find_run(reader, text) for text in texts]
    if repeats:
        wanted = []
        for run in ids:
            meant = queries.get_run(reader, run)
            same = configuration(meant)
            named = runs_of_name(reader, meant.name)
            like = [other for other in named if configuration(queries.get_run(reader, other)) == same]
            kept = like if most is None else [run, *[other for other in like if other != run][: most - 1]]
            wanted += [other for other in like if other in kept]
        ids = wanted
    return list(dict.fromkeys(ids))


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """Group repeats, in the order in which they were named; each run alone if otherwise there were only one side."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr((run.name, configuration(run))), []).append(run)
    return [*groups.values()] if len(groups) > 1 else [[run] for run in runs]


def configuration(run: Run) -> list[tuple[str, Any]]:
    """Return what repeats have in common: everything about a run except the seed and the versions."""
    return sorted((name, repr(value)) for name, value in flattened(run.config).items() if not _is_seed(name))


def flattened(config: Any, path: str = "") -> dict[str, Any]:
    """Return settings by their path: «experiment.local.lr». An experiment stored as TOML is parsed."""
    if isinstance(config, str) and path == "experiment":
        try:
            config = tomllib.loads(config)
        except tomllib.TOMLDecodeError:
            return {path: config}
    if not isinstance(config, Mapping):
        return {path: config}
    settings: dict[str, Any] = {}
    for name, value in config.items():
        settings |= flattened(value, f"{path}.{name}" if path else str(name))
    return settings


def all_settings(groups: Sequence[Sequence[Run]]) -> tuple[Setting, ...]:
    """Return configuration, seeds, versions, host and model of these groups of runs."""
    tables = [_settings(group) for group in groups]
    names = dict.fromkeys(name for table in tables for name in table)
    described = [isinstance(group[0].config.get("experiment"), str) for group in groups]
    settings = []
    for name in names:
        defaults = tuple(lab and is_default(name, table) for lab, table in zip(described, tables, strict=True))
        values = (
            DEFAULTS.get(name) if default else table.get(name) for default, table in zip(defaults, tables, strict=True)
        )
        settings.append(Setting(name, tuple(values), defaults))
    return tuple(settings)


def _settings(group: Sequence[Run]) -> dict[str, Any]:
    run = group[0]
    told_above = ("experiment.name",)  # the run's own name
    settings = flattened(run.config).items()
    own = {name: value for name, value in settings if not _is_seed(name) and name not in told_above}
    weights = {
        layer.name: list(layer.shape) for table in run.tables if table.rows == "parameter" for layer in table.layers
    }
    return {
        "name": run.name,
        "host": run.host,
        "topology": run.topology,
        **own,
        "model": f"{len(weights)} layers: {weights}" if weights else None,
        "seed": [repeat.seed for repeat in group] if len(group) > 1 else run.seed,
        # The time to compile a kernel is not part of its version.
        **{f"versions.{name}": re.sub(r" in \d+ ms", "", version) for name, version in run.versions.items()},
    }


def _is_seed(name: str) -> bool:
    return name.rpartition(".")[2] == "seed"


def _side(letter: str, side: Sequence[Figures]) -> Side:
    first = side[0]
    return Side(
        letter,
        first.run.name,
        tuple(f.run.id for f in side),
        tuple(f.run.seed for f in side),
        first.rounds,
        first.clients,
        all(f.judged for f in side),
        first.verdict,
    )


def _rounds_to(level: int, figures: Figures) -> float | None:
    """Return the rounds until the accuracy reached a level, by its index in LEVELS; None if it never did."""
    return figures.reached[level].rounds


def _lines(clock: str) -> list[tuple[str, str, str, str, Value]]:
    """Return topic, name, unit, which direction is better, and how the value is read."""

    def seconds(f: Figures) -> Mapping[int, float]:
        return f.virtual_seconds if clock == "virtual" else f.seconds

    def real(f: Figures) -> float | None:
        return mean([*f.seconds.values()])

    def trouble(f: Figures) -> float | None:
        return sum(map(is_trouble, f.cases)) if f.judged else None

    lines: list[tuple[str, str, str, str, Value]] = [
        ("learning", "accuracy, last", "share", "higher", lambda f: last(f.accuracy)),
        ("learning", "accuracy, best", "share", "higher", lambda f: highest(f.accuracy)),
        ("learning", "loss, last", "1", "lower", lambda f: last(f.loss)),
    ]
    lines += [
        ("learning", f"rounds to {100 * level:.0f} %", "rounds", "lower", functools.partial(_rounds_to, i))
        for i, level in enumerate(LEVELS)
    ]
    lines += [
        ("time", f"round ({clock} clock)", "seconds", "lower", lambda f: mean([*seconds(f).values()])),
        *([("time", "round (real clock)", "seconds", "lower", real)] if clock == "virtual" else []),
        ("time", f"longest round ({clock})", "seconds", "lower", lambda f: highest(seconds(f))),
        ("time", f"all rounds ({clock})", "seconds", "lower", lambda f: sum(seconds(f).values()) or None),
        ("memory", "peak memory", "bytes", "lower", lambda f: f.peak_bytes),
        ("memory", "growth over the run", "bytes", "lower", lambda f: f.growth_bytes),
        ("bytes", "up, a round", "bytes", "lower", lambda f: f.traffic.up.bytes / max(1, f.rounds) or None),
        ("bytes", "down, a round", "bytes", "lower", lambda f: f.traffic.down.bytes / max(1, f.rounds) or None),
        ("bytes", "all in all, without telemetry", "bytes", "lower", lambda f: f.traffic.bytes or None),
        ("bytes", "compression, up", "times", "higher", lambda f: f.traffic.up.compression),
        ("bytes", "telemetry, of all bytes", "share", "lower", lambda f: f.traffic.telemetry_share or None),
        ("findings", "issues", "cases", "lower", lambda f: len(f.cases) if f.judged else None),
        ("findings", "of which problems", "cases", "lower", trouble),
    ]
    return lines


def _row(
    sides: Sequence[Sequence[Figures]], topic: str, name: str, unit: str, better: str, value: Value
) -> ComparisonRow:
    measured = [[v for f in side if (v := value(f)) is not None] for side in sides]
    # A side where some repeats never got there has no mean: the mean of the others would flatter it.
    whole = [values if len(values) == len(side) else [] for values, side in zip(measured, sides, strict=True)]
    finite = [values if all(map(math.isfinite, values)) else [] for values in whole]
    return ComparisonRow(
        topic,
        name,
        unit,
        better,
        tuple(map(_mean, whole)),
        tuple(
            change(finite[0], values, pairs=_by_seed(sides[0], side) if finite[0] and values else None)
            for values, side in zip(finite[1:], sides[1:], strict=True)
        ),
    )


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if all(map(math.isfinite, values)) else math.nan


def _by_seed(before: Sequence[Figures], after: Sequence[Figures]) -> list[int] | None:
    return pairing([f.run.seed for f in before], [f.run.seed for f in after])


def _troubles(sides: Sequence[Sequence[Figures]]) -> tuple[Trouble, ...]:
    severities: dict[tuple[str, str], str] = {}
    counts: dict[tuple[str, str], list[int]] = {}
    for i, side in enumerate(sides):
        for figures in side:
            for key, case in {_key(case): case for case in figures.cases}.items():
                counts.setdefault(key, [0] * len(sides))[i] += 1
                severities[key] = min(severities.get(key, case.severity), case.severity, key=severity_rank)
    troubles = [Trouble(issue, place, severities[issue, place], tuple(n)) for (issue, place), n in counts.items()]
    return tuple(
        sorted(troubles, key=lambda trouble: severity_rank(trouble.severity))
    )  # causes stay before consequences


def _key(case: Case) -> tuple[str, str]:
    """Return the identity of a case without its group: a client in another cluster still has the same trouble."""
    words = [case.node or case.group, None if case.layer is None else f"layer {case.layer}"]
    return case.issue, ", ".join(word for word in words if word) or "the whole run"


def _middle(repeats: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Return the median over repeats of a value by round."""
    by_round: dict[int, list[float]] = {}
    for values_by_round in repeats:
        for number, value in values_by_round.items():
            by_round.setdefault(number, []).append(value)
    finite = {number: [v for v in values if math.isfinite(v)] for number, values in sorted(by_round.items())}
    return {number: median(values) if values else math.nan for number, values in finite.items()}


def _confidence(sides: Sequence[Sequence[Figures]], rows: Sequence[ComparisonRow]) -> str:
    counts = [len(side) for side in sides]
    if max(counts) == 1:
        return (
            "One run each: no difference here can be distinguished from chance. Repeat them with other seeds, and "
            "compare again with --repeats."
        )
    if min(counts) == 1:
        alone = ", ".join(letter for letter, n in zip(LETTERS, counts, strict=False) if n == 1)
        return (
            f"Only one run of {alone}: no difference from it can be distinguished from chance. Repeat it with other "
            "seeds."
        )
    judged = [c for row in rows for c in row.changes if c is not None and c.beyond_chance is not None]
    beyond = sum(bool(c.beyond_chance) for c in judged)
    by_chance = 0.05 * len(judged)
    return (
        f"{beyond} of {len(judged)} differences are larger than chance explains (95 % intervals {_method(sides)}); "
        f"about {by_chance:.0f} would be by chance alone."
    )


def _method(sides: Sequence[Sequence[Figures]]) -> str:
    """Return how the intervals were computed, for the sides with the seeds of the first and for those without."""
    paired = [_by_seed(sides[0], side) is not None for side in sides[1:]]
    seeds = ", ".join(str(f.run.seed) for f in sorted(sides[0], key=lambda f: f.run.seed or 0))
    by_seed = f"of the differences seed by seed, over the seeds {seeds} of both sides"
    counts = " and ".join(str(len(side)) for side in sides)
    welch = f"after Welch, over {counts} runs of different seeds"
    if all(paired):
        return by_seed
    if not any(paired):
        return welch
    letters = [letter for letter, same in zip(LETTERS[1:], paired, strict=False) if same]
    return f"{by_seed.removesuffix(' of both sides')} of {LETTERS[0]} and {', '.join(letters)}; else {welch}"
