# SPDX-License-Identifier: Apache-2.0
"""Run Flower apps that others wrote plain, with two lines and with none, and compare what comes out.

    python -m fedvitals_studies.flower.foreign_apps FOLDER [--app NAME]... [--rounds 3] [--nodes 3] [--json FILE]

FOLDER holds one app per folder, as `flwr run` takes them, for example the `examples` of Flower's repository. Each app
runs four times in simulation: plain twice, because most apps draw random numbers and differ from themselves; with
`client_mod()` and `attach()` written into a copy; and unchanged, watched through the environment. What an app needs
must be installed here; `--path` names folders to put before it, for example with stand-ins for data that cannot be
downloaded. Results are the metrics in Flower's log.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedvitals.errors import FedvitalsError
from fedvitals.hosts.watch_settings import FLOWER, WatchSettings
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals_studies.flower.simulation import SuperLink
from fedvitals_studies.flower.two_lines import add_two_lines

PLAIN, AGAIN, TWO_LINES, NO_LINE = WAYS = ("plain", "plain again", "two lines", "no line")
METRICS = re.compile(r"MetricRecord: (\{.*\})|^.*?\bround (\d+: \S+)$|(\{'[^']+': \[\(.*\})", re.MULTILINE)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|\bnan\b|-?\binf\b")
FAILED = re.compile(r"Traceback \(most recent call last\)|finished:failed|ERROR.*exit", re.IGNORECASE)
ROUND_SETTINGS = ("num-server-rounds", "num_server_rounds", "num-rounds")
RUN_SECONDS = 600.0


@dataclass
class WayOutcome:
    """The result of one way to run an app. `problem`: why there is none; else empty."""

    metrics: list[float] = field(default_factory=list)
    rounds_seen: int = 0  # by fedvitals
    monitor_errors: int = 0
    problem: str = ""


@dataclass
class AppOutcome:
    """The results of an app, by way, and one sentence on each monitored way."""

    name: str
    ways: dict[str, WayOutcome] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)


def apps_in(folder: Path) -> list[Path]:
    """Return the folders in this folder that `flwr run` takes."""
    return [
        file.parent for file in sorted(folder.glob("*/pyproject.toml")) if "flwr" in _settings(file).get("tool", {})
    ]


def _settings(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def metrics_of(log: str) -> list[float]:
    """Return all numbers of the metrics in Flower's log, in order; seconds and addresses are excluded."""
    lines = (next(part for part in match.groups() if part) for match in METRICS.finditer(log))
    return [float(number) for line in lines for number in NUMBER.findall(line)]


def compared(metrics: Sequence[float], plain: Sequence[float], again: Sequence[float]) -> str:
    """Return how metrics differ from those of a plain run, relative to how a second plain run does."""
    if not plain:
        return "not comparable: the plain run logged no metrics"
    if len(metrics) != len(plain):
        return f"DIFFERS: {len(metrics)} numbers, {len(plain)} plain"
    distance, own = _distance(metrics, plain), _distance(again, plain) if len(again) == len(plain) else math.inf
    if distance == 0:
        return "the same"
    if own == 0:
        return f"DIFFERS by {distance:.2g}, and plain runs do not"
    return f"differs by {distance:.2g}, plain runs by {own:.2g}"


def _distance(numbers: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference; numbers that are both NaN, or the same infinity, do not differ."""
    pairs = [(a, b) for a, b in zip(numbers, others, strict=True) if a != b and not (math.isnan(a) and math.isnan(b))]
    relative = (abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)
    return max((ratio if math.isfinite(ratio) else math.inf for ratio in relative), default=0.0)


class Study:
    """Runs apps. `path`: folders that come first in their processes' module search path."""

    def __init__(self, work: Path, path: Sequence[Path], *, nodes: int, rounds: int | None) -> None:
        self._work, self._nodes, self._rounds = work, nodes, rounds
        before = [str(folder.absolute()) for folder in path]
        inherited = [*before, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self._environment = {"PYTHONPATH": os.pathsep.join(inherited)} if inherited else {}

    def run(self, app: Path) -> AppOutcome:
        """Run an app in all ways and compare."""
        outcome = AppOutcome(app.name)
        for way in WAYS:
            sys.stderr.write(f"{app.name}: {way}\n")
            outcome.ways[way] = self._run_way(app, way)
        plain = outcome.ways[PLAIN]
        for way in (TWO_LINES, NO_LINE):
            own = outcome.ways[way]
            if plain.problem:
                outcome.verdicts[way] = f"the app does not run here: {plain.problem}"
            else:
                again = outcome.ways[AGAIN].metrics
                outcome.verdicts[way] = own.problem or compared(own.metrics, plain.metrics, again)
        return outcome

    def _run_way(self, app: Path, way: str) -> WayOutcome:
        folder = self._work / f"{app.name}-{way.replace(' ', '-')}"
        store = folder / "runs.db"
        copy = folder / app.name
        try:
            shutil.copytree(app, copy, ignore=shutil.ignore_patterns(".venv", "__pycache__", ".git"))
            if way == TWO_LINES:
                add_two_lines(copy, store)
            environment = dict(self._environment)
            if way == NO_LINE:
                inherited = {**os.environ, **environment}
                environment |= WatchSettings(store=str(store)).variables(inherited, FLOWER)
            with SuperLink(environment) as superlink:
                log = superlink.simulate(copy, self._run_config(copy), nodes=self._nodes, seconds=RUN_SECONDS)
        except FedvitalsError as error:
            return WayOutcome(problem=str(error).strip().splitlines()[-1][:300])
        (folder / "run.log").write_text(log, encoding="utf-8")
        outcome = WayOutcome(metrics_of(log))
        if not outcome.metrics and FAILED.search(log):
            outcome.problem = next((line for line in reversed(log.splitlines()) if "Error" in line), "it failed")[:300]
        return _with_store(outcome, store) if store.exists() else outcome

    def _run_config(self, app: Path) -> Mapping[str, Any]:
        known = _settings(app / "pyproject.toml")["tool"]["flwr"]["app"].get("config", {})
        return {} if self._rounds is None else {name: self._rounds for name in ROUND_SETTINGS if name in known}


def _with_store(outcome: WayOutcome, store: Path) -> WayOutcome:
    with open_reader(store) as reader:
        for run in queries.list_runs(reader):
            outcome.rounds_seen += run.rounds
            outcome.monitor_errors += sum(event.name == "monitor.error" for event in queries.events(reader, run.id))
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the apps of a folder and print a table; 1 if a watched run differs from a plain one, or saw nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--app", action="append", help="run only this one; may be given several times")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="of each app, where it has such a setting")
    parser.add_argument("--path", type=Path, action="append", default=[], help="a folder of modules to put first")
    parser.add_argument("--work", type=Path, help="keep copies, stores and logs in this folder")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    options = parser.parse_args(arguments)
    apps = [app for app in apps_in(options.folder) if not options.app or app.name in options.app]
    with tempfile.TemporaryDirectory() as temporary:
        study = Study(options.work or Path(temporary), options.path, nodes=options.nodes, rounds=options.rounds)
        outcomes = [study.run(app) for app in apps]
    for outcome in outcomes:
        for way, verdict in outcome.verdicts.items():
            own = outcome.ways[way]
            seen = f"{own.rounds_seen} rounds seen, {own.monitor_errors} errors of ours"
            sys.stdout.write(f"{outcome.name:32} {way:10} {verdict}; {seen}\n")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1), encoding="utf-8")
    watched = [
        (outcome.verdicts[way], outcome.ways[way])
        for outcome in outcomes
        for way in (TWO_LINES, NO_LINE)
        if not outcome.ways[PLAIN].problem
    ]
    return int(any("DIFFERS" in verdict or not own.rounds_seen or own.monitor_errors for verdict, own in watched))


if __name__ == "__main__":
    raise SystemExit(main())
