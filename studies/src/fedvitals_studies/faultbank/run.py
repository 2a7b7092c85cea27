# SPDX-License-Identifier: Apache-2.0
"""Trains and monitors one case of the fault bank: what detectors may see, and separately what was wrong."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.engines.site import Site
from fedvitals.lab.stacked.executor import stacking_obstacle
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.presets import Preset, preset
from fedvitals.protocols import Node
from fedvitals.records import Action, Event
from fedvitals.store import MemoryStore
from fedvitals_studies.faultbank.baselines.updates import UpdateBaselines
from fedvitals_studies.faultbank.cases import Case
from fedvitals_studies.faultbank.matrix import called
from fedvitals_studies.faultbank.recording import Recording

TRANSFORMED = "updates.transformed"
ATTACKS = ("attacks", "tune-attacks")  # banks in which attack detectors that need every round also run
SCALE_ROUNDS = 4  # gradient scale is measured every this many rounds


class About(msgspec.Struct):
    """What is known of a case besides its recording: never shown to a detector."""

    case: str
    bank: str
    domain: str
    experiment: str  # as TOML
    faults: list[dict[str, Any]] = []
    accuracy: list[float] = []
    loss: list[float | None] = []  # of the global model on the server's test, per round; None: not finite
    attack: list[float] = []  # success of a backdoor, per round; empty: there is none
    present: dict[str, list[int]] = {}
    groups: dict[str, str] = {}
    seconds: float = 0.0
    engine: str = ""
    device: str = "cpu"  # on which it trained: this, or the name of a GPU
    updates: dict[str, dict[str, dict[str, float]]] = {}  # baselines on the updates: method, round, node


@dataclass
class Watched:
    recording: Recording
    about: About


def bank_preset() -> Preset:
    """Return `standard`, with as much measured on a slow machine as on a fast one."""
    usual = preset("standard")
    probes = tuple(p if p.percent is None else replace(p, percent=None, rounds=SCALE_ROUNDS) for p in usual.probes)
    return replace(usual, probes=probes, fit_percent=None)


@dataclass
class Tee:
    """The monitor, together with the baselines that need the updates themselves."""

    monitor: Monitor
    baselines: UpdateBaselines | None = None
    looked: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    _model: Any = None

    def round_begin(self, round_index: int, global_state: Any = None) -> None:
        self._model = global_state
        self.monitor.host.round_begin(round_index, global_state)

    def updates(self, round_index: int, updates: Mapping[Node, Any]) -> Sequence[Action]:
        if self.baselines is not None and self.baselines.wants(round_index):  # an engine passes a round in parts
            self.baselines.gather(round_index, _at_home(updates), self._model)
        return self.monitor.host.updates(round_index, updates)

    def round_end(self, round_index: int, global_state: Any = None, metrics: Mapping[str, float] | None = None) -> None:
        if self.baselines is not None:
            for method, found in self.baselines.close().items():
                self.looked.setdefault(method, {})[str(round_index)] = found
        self.monitor.host.round_end(round_index, global_state, metrics)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.monitor.host, name)


def _at_home(updates: Mapping[Node, Any]) -> Mapping[Node, Any]:
    """Return the updates on the CPU, where the baselines work; unchanged if they are there already."""
    if all(tensor.is_cpu for pieces in updates.values() for tensor in pieces):
        return updates
    found = {}
    for node, pieces in updates.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in pieces]).cpu()  # one transfer for all of them
        found[node] = flat.split([tensor.numel() for tensor in pieces])
    return found


def healthy_site(experiment: lab.Experiment, data: Path | None) -> Site:
    """Return the federation without its faults: everything needed before it trains."""
    return Site.of(msgspec.structs.replace(experiment, faults=()), data)


def filled(case: Case, site: Site) -> lab.Experiment:
    """Return the experiment with data-dependent settings filled in: a label flip starts at a client's largest class."""
    if not case.flips_largest:
        return case.experiment
    fault, *beside = case.experiment.faults
    flips = []
    for node in fault.nodes:
        counts = site.labels[node]
        source = int(counts.argmax())
        others = counts.clone()
        others[source] = -1
        flips.append(msgspec.structs.replace(fault, nodes=(node,), source=source, target=int(others.argmax())))
    return msgspec.structs.replace(case.experiment, faults=(*flips, *beside))


def engine_of(experiment: lab.Experiment) -> str:
    """Return the engine, by the model alone, so that the same case gives the same numbers everywhere."""
    return "stacked" if isinstance(experiment.model, lab.MLP | lab.Logistic | lab.Transformer) else "reuse"


def _watching(case: Case, experiment: lab.Experiment, site: Site, store: MemoryStore) -> Tee:
    """Return the monitor with baselines in the middle and at the end of the run; they support neither tokens nor
    numbers.
    """
    monitor = Monitor(None, probes=bank_preset(), host="lab", detectors=(), sinks=[store])
    if site.dataset.vocabulary is not None or site.dataset.targets != "classes" or case.setting is not None:
        return Tee(monitor)
    last = experiment.rounds - 1
    looks = (last // 2, last)
    shape, histories = site.dataset.shape, case.bank in ATTACKS
    return Tee(monitor, UpdateBaselines(site.module, shape, experiment.seed, looks, histories=histories))


def watch(case: Case, data: Path | None = None, device: str = "cpu") -> Watched:
    """Train the case with the monitor. On a GPU with the engine «stacked»; what cannot be stacked trains on the CPU.

    So does what the lab refuses there: `About.device` records where it trained.
    """
    torch.set_num_threads(1)
    site = healthy_site(case.experiment, data)
    experiment = filled(case, site)
    if device != "cpu" and stacking_obstacle(site) is None:
        with contextlib.suppress(ConfigError):
            return _watched(case, experiment, site, data, "stacked", device)
    engine = engine_of(experiment)
    if engine == "stacked" and stacking_obstacle(site) is not None:
        engine = "reuse"
    return _watched(case, experiment, site, data, engine, "cpu")


def _watched(
    case: Case, experiment: lab.Experiment, site: Site, data: Path | None, engine: str, device: str
) -> Watched:
    store = MemoryStore()
    tee = _watching(case, experiment, site, store)
    monitor = tee.monitor
    began = time.perf_counter()
    result = lab.run(experiment, tee, engine=engine, workers=1, device=device, data=data)
    seconds = time.perf_counter() - began
    where = "cpu" if device == "cpu" else torch.cuda.get_device_name(device)
    monitor.close()
    run = monitor.run.id
    history = store.history(run)
    recording = Recording.of(history, sorted(store.memory(run).metrics))
    recording.told = [_plain(event) for event in recording.told if not (case.untold and event.name == TRANSFORMED)]
    truth = [
        {"kind": t.kind, "nodes": list(t.nodes), "since": t.since, "until": t.until, **t.data}
        for t in store.truth_of(run)
    ]
    accuracy, loss, attack = (
        [r.metrics[name] for r in result.rounds if name in r.metrics] for name in ("accuracy", "loss", "attack.success")
    )
    about = About(
        case.name,
        case.bank,
        case.domain,
        case.experiment.to_toml(),
        truth,
        accuracy,
        [value if math.isfinite(value) else None for value in loss],
        attack,
        _present(experiment, recording),
        _groups(recording.told),
        seconds,
        result.engine,
        where,
        tee.looked,
    )
    return Watched(recording, about)


def _plain(event: Event) -> Event:
    """Return the event without its traceback, which is long and not used."""
    data = {key: value for key, value in event.data.items() if key != "traceback"}
    return replace(event, where=replace(event.where, run=""), data=data)


def _present(experiment: lab.Experiment, recording: Recording) -> dict[str, list[int]]:
    """Return the rounds in which each client took part: as asked or, if asynchronous, when its update arrived."""
    if not isinstance(experiment.topology, lab.Asynchronous):
        return called(experiment)
    arrived = {node: recording.series("update.norm", node)[0] for node in experiment.nodes}
    return {node: rounds for node, rounds in arrived.items() if rounds}


def _groups(events: Sequence[Event]) -> dict[str, str]:
    groups: dict[str, str] = {}
    for event in events:
        if event.name == "groups":
            groups |= {node: group for group, nodes in event.data.items() for node in nodes}
    return groups
