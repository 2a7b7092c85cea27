# SPDX-License-Identifier: Apache-2.0
"""Fork a run: the lab trains again from a recorded round on, with a change, as a new run beside the old one.

The recorded corrections apply again, so that a fork without a change is the recorded run, bit for bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fedvitals.errors import ConfigError
from fedvitals.lab.engines.engine import Engine
from fedvitals.lab.engines.site import Site
from fedvitals.lab.federation import ServerState
from fedvitals.lab.run import rounds
from fedvitals.monitor.host import HostObserver
from fedvitals.monitor.monitor import Monitor
from fedvitals.monitor.monitored_run import MonitoredRun
from fedvitals.records import Action, Finding
from fedvitals.replay.counterfactual.change import WhatIfChange, check_restores
from fedvitals.replay.player.player import Player
from fedvitals.replay.player.reused_updates import ChangeObserver, groups_of_round
from fedvitals.replay.tape.tape import Tape
from fedvitals.store import open_reader
from fedvitals.store.read import queries


@dataclass(frozen=True, slots=True)
class ForkFinding:
    """An issue that a run's detectors reported from the fork on, and of which node."""

    issue: str
    node: str | None
    first: int | None


@dataclass
class Fork:
    """A finished fork: metrics and findings of parent and fork."""

    run: str  # the new one
    parent: str
    at: int
    change: str
    recorded: dict[int, dict[str, float]] = field(default_factory=dict)  # metrics of the parent, by round
    forked: dict[int, dict[str, float]] = field(default_factory=dict)
    gone: list[ForkFinding] = field(default_factory=list)  # findings that only the parent has
    new: list[ForkFinding] = field(default_factory=list)  # and only the fork
    both: list[ForkFinding] = field(default_factory=list)
    seconds: float = 0.0

    def differences(self, metric: str = "accuracy") -> dict[int, float]:
        """Return by round how much higher the metric is in the fork."""
        there = [r for r in self.forked if metric in self.forked[r] and metric in self.recorded.get(r, {})]
        return {r: self.forked[r][metric] - self.recorded[r][metric] for r in there}


def fork(
    player: Player,
    at: int,
    change: WhatIfChange,
    *,
    store: str | Path,
    until: int | None = None,
    name: str | None = None,
    progress: Callable[[int, Mapping[str, float]], None] = lambda *_: None,
) -> Fork:
    """Run again from the beginning of round `at` on, with a change, as a new run in `store`.

    `until`: the last round, by default that of the run. `progress` is called with every round and its metrics.
    """
    tape, settings = player.tape, player.tape.setting
    tape.entry(at)
    last = player.experiment.rounds - 1 if until is None else until
    if not at <= last < player.experiment.rounds:
        raise ConfigError(f"A fork at round {at} ends in round {at} to {player.experiment.rounds - 1}; got {last}.")
    change.check(player.experiment, groups_of_round(tape, at))
    check_restores(tape, at, last)
    experiment = change.experiment(player.described)
    began, server = time.perf_counter(), player.server(at)
    kept = {key: tensor.clone() for key, tensor in player.engine().optimizers().items()}

    def engine(site: Site) -> Engine:
        where = (str(settings.description.get("device", "cpu")), str(settings.description.get("precision", "float32")))
        restored = Engine(site, str(settings.description["engine"]), player.workers, *where)
        restored.restore_optimizers(kept)
        return restored

    done: dict[int, dict[str, float]] = {}
    start: tuple[int, ServerState] | None = None if at == 0 and change.no_faults else (at, server)
    with _monitor(player, at, change, store, name) as monitor:
        observer = ForkObserver(monitor.host.monitored, ChangeObserver(tape, at, change))
        going = rounds(experiment, observer, engine=engine, data=player.data, start=start)
        with contextlib.closing(going):  # type: ignore[type-var]
            for progressed in going:
                latest = progressed.rounds[-1]
                done[latest.number] = latest.metrics
                progress(latest.number, latest.metrics)
                if latest.number >= last:
                    break
    result = Fork(monitor.run.id, settings.run, at, change.text, forked=done)
    result.recorded = {r: tape.entry(r).measured_metrics() for r in done if r in tape.rounds}
    _compare_findings(result, store, last)
    result.seconds = time.perf_counter() - began
    return result


class ForkObserver(HostObserver):
    """The observer of a forked run. It also prescribes the recorded corrections and those of the change."""

    def __init__(self, monitored: MonitoredRun, steering: ChangeObserver) -> None:
        super().__init__(monitored)
        self._steering = steering

    def prescribed(self, round_index: int) -> Sequence[Action]:
        return [*super().prescribed(round_index), *self._steering.prescribed(round_index)]

    def updates(self, round_index: int, updates: Mapping[str, Any]) -> Sequence[Action]:
        return [*super().updates(round_index, updates), *self._steering.updates(round_index, updates)]

    def refused(self, action: Action, why: str) -> None:
        self._steering.refused(action, why)


def _monitor(player: Player, at: int, change: WhatIfChange, store: str | Path, name: str | None) -> Monitor:
    """Return a monitor with the parent's settings, taped as it was."""
    settings, experiment = player.tape.setting, player.described
    parent = _config_of(store, settings.run)
    ours = parent.get("fedvitals", {})
    config = {"parent": settings.run, "forked_at": at, "change": change.text}
    with contextlib.suppress(ConfigError):  # objects of the user's own
        config["experiment"] = msgspec.structs.replace(change.experiment(experiment), faults=()).to_toml()
    kept = {key: settings.kept[key] for key in ("every", "updates", "budget", "durable") if key in settings.kept}
    preset = ours.get("probes")
    return Monitor(
        store,
        run=name or f"{settings.name} (fork)",
        probes=preset if preset in ("light", "standard", "deep") else "standard",
        privacy=ours.get("privacy"),
        host="lab",
        seed=experiment.seed,
        topology=type(experiment.topology).__name__.lower(),
        config=config,
        tape=Tape(**kept),
    )


def _config_of(store: str | Path, run: str) -> Mapping[str, Any]:
    """Return the parent's configuration; empty where it lies in another store."""
    with contextlib.suppress(ConfigError), open_reader(store) as reader:
        return queries.get_run(reader, run).config
    return {}


def _compare_findings(result: Fork, store: str | Path, last: int) -> None:
    with open_reader(store) as reader:
        parent = _findings(queries.records(reader, result.parent, Finding), result.at, last)
        child = _findings(queries.records(reader, result.run, Finding), result.at, last)
    result.gone = [finding for key, finding in parent.items() if key not in child]
    result.new = [finding for key, finding in child.items() if key not in parent]
    result.both = [finding for key, finding in child.items() if key in parent]


def _findings(findings: Sequence[Finding], first: int, last: int) -> dict[tuple[str, str | None], ForkFinding]:
    """Return each issue and node once, from the round of the fork on."""
    kept: dict[tuple[str, str | None], ForkFinding] = {}
    for finding in findings:
        round_index = finding.where.round
        if round_index is None or first <= round_index <= last:
            key = finding.issue, finding.where.node or finding.where.group
            kept.setdefault(key, ForkFinding(finding.issue, key[1], round_index))
    return kept
