# SPDX-License-Identifier: Apache-2.0
"""What is printed while a lab runs and when it ends; the same for every engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from fedvitals.cli.screen import new_progress
from fedvitals.views.metric_titles import metric_title
from fedvitals.views.units import number, percent

if TYPE_CHECKING:
    from fedvitals.lab import Experiment, Round
    from fedvitals.records import Record


@dataclass(frozen=True)
class EndedRun:
    """How an experiment ended."""

    run: str | None
    rounds: int
    metrics: dict[str, float]  # of the last one
    engine: str


class Alarms:
    """A sink that counts what a user should see: warnings and errors, and findings, one per issue and client."""

    def __init__(self) -> None:
        self.count, self.first = 0, ""
        self.findings: dict[tuple[str, str | None], str] = {}  # the worst severity of each

    def write(self, records: Sequence[Record], /) -> None:
        from fedvitals.records import Event, Finding

        for record in records:
            if isinstance(record, Finding) and record.severity != "note":
                place = (record.issue, record.where.node)
                self.findings[place] = min(record.severity, self.findings.get(place, record.severity))
            elif isinstance(record, Event) and record.level in ("warning", "error", "critical"):
                self.count += 1
                self.first = self.first or record.message


def quality_of(metrics: Mapping[str, float]) -> str:
    """Return the quality of a round's model in words: its accuracy, or its loss for a task without one."""
    quality = ""
    for prefix in ("", "local."):  # a model with personal parts only has local tests
        if f"{prefix}accuracy" in metrics:
            quality = f"{metric_title(f'{prefix}accuracy')} {percent(metrics[f'{prefix}accuracy'])}"
        elif f"{prefix}loss" in metrics:
            quality = f"{metric_title(f'{prefix}loss')} {number(metrics[f'{prefix}loss'])}"
        if quality:
            break
    attack = f", attack's success {percent(metrics['attack.success'])}" if "attack.success" in metrics else ""
    return quality + attack


class Progress:
    """Shows rounds, the model's quality and the time left: a bar on a terminal, a line per round elsewhere."""

    def __init__(self, experiment: Experiment, *, plain: bool) -> None:
        self._rounds, self._name = experiment.rounds, experiment.name
        self._bar = None if plain or not sys.stderr.isatty() else new_progress("{task.fields[quality]}")
        self._task: Any = None
        self.done = 0  # rounds

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=self._rounds, quality="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: Round) -> None:
        self.done = done.number + 1
        quality = quality_of(done.metrics)
        if self._bar is None:
            click.echo(f"round {self.done}/{self._rounds}: {quality} ({done.seconds:.2f} s)", err=True)
        else:
            self._bar.update(self._task, completed=self.done, quality=quality)

    def say(self, text: str) -> None:
        """Print a remark beside the rounds, such as what is being waited for."""
        if self._bar is None:
            click.echo(text, err=True)
        else:
            self._bar.console.print(text, highlight=False, markup=False)


def remember(folder: Path, run: str | None, experiment: Experiment) -> None:
    """Record which run the saved state belongs to, so that `--resume` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text(experiment.to_toml(), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"run": run}), encoding="utf-8")
