# SPDX-License-Identifier: Apache-2.0
"""Runs one condition of the study: the lab trains, the monitor measures, and its records become the figures' series.

Everything measured here is what a user's monitor would measure: this is a sink like any other, which sums over the
clients of a round.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.full_gradient import full_gradient
from fedvitals.probes.gradients import gradients
from fedvitals.probes.nonlinearity import nonlinearity
from fedvitals.probes.presets import Planned, Preset
from fedvitals.probes.scale import scale
from fedvitals.probes.weights import weights
from fedvitals.protocols import Moment
from fedvitals.records import Event, LayerStats, Metric, Record, Run, Transfer
from fedvitals.schedule import always
from fedvitals.stats import COUNT, SUM, SUM_MAGNITUDES
from fedvitals_studies.packs.commit import commit
from fedvitals_studies.reproduce.conditions import Condition
from fedvitals_studies.reproduce.observer import ALL, Wanted, Watch
from fedvitals_studies.reproduce.paper_weights import PaperWeights

SEED = 2024
IMAGES = 16  # per client, on which gradient scale is measured at the end of a round
IMAGES_EACH = 4  # the same at every iteration: 400 of a cohort, whose mean is about 3 % from that of all images
NLC_ROUNDS = 5  # one in this many rounds
IMAGES_ON_CUDA = 32  # per client, at every iteration as at the end of a round: cheap there
WINDOW = (4, 0)  # the rounds out of five with a whole-set gradient at every iteration: two in a row
WITHOUT_EDGES = ("beyond",)  # studies in which no claim is about what happens at an edge
EXACT_ROUNDS = (0, 9, 24, 49)  # of the rounds measured on the whole set: exactly, one backward pass per class

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class at_step:  # noqa: N801 - reads as the schedules every() and first()
    """At one step of each client-round."""

    step: int

    def __call__(self, moment: Moment) -> bool:
        return moment.step == self.step


def measure(
    condition: Condition,
    repeat: int,
    *,
    data: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    engine: str = "auto",
    workers: int | None = None,
    progress: Progress | None = None,
    arrays: bool | None = None,
) -> dict[str, Any]:
    """Return the result of one repeat of a condition, as JSON. `arrays`: by a watcher instead of the monitor, as on a
    GPU.
    """
    experiment = experiment_of(condition, repeat)
    began = time.perf_counter()
    arrays = device != "cpu" if arrays is None else arrays
    if condition.keep_optimizer or arrays:  # optimisers, and arrays, stay in one process
        engine, workers = "stacked", 1
    running = {"data": data, "device": device, "engine": engine, "workers": workers, "progress": progress}
    how = _watched if arrays else _monitored
    result, losses, tally, lost = how(condition, repeat, experiment, running)
    series = tally.series() | _evaluated(result.rounds)
    if condition.every_iteration:
        edges = tally.group_of if condition.topology == "hierarchical" else {}
        series["iteration.loss"] = _losses(losses, edges, condition.batches)
    return {
        "condition": condition.name,
        "study": condition.study,
        "topology": condition.topology,
        "scenario": condition.scenario,
        "clipped": condition.clipped,
        "repeat": repeat,
        "seed": experiment.seed,
        "dataset": condition.dataset,
        "digest": lab.Site.of(experiment, data).dataset.digest,
        "clients": condition.clients,
        "rounds": condition.rounds,
        "iterations": condition.iterations,
        "commit": commit(),
        "seconds": time.perf_counter() - began,
        "engine": result.engine,
        "device": device,
        "machine": _machine(device),
        "images": _images(condition, arrays=arrays),
        "settings": {name: _plain(value) for name, value in condition.settings.items()},
        "series": _plain(series),
        "lost": lost,
    }


Watched = tuple[lab.Result, list[Mapping[str, Any]], "CohortSums | Watch", int]


def _monitored(condition: Condition, repeat: int, experiment: lab.Experiment, running: Mapping[str, Any]) -> Watched:  # noqa: ARG001
    tally = CohortSums(condition)
    with Monitor(
        None, run=condition.name, probes=probes_of(condition), sinks=[tally], host="lab", seed=experiment.seed
    ) as m:
        result, losses = _rounds(condition, experiment, m, m.flush, **running)
    return result, losses, tally, m.lost


def _watched(condition: Condition, repeat: int, experiment: lab.Experiment, running: Mapping[str, Any]) -> Watched:
    wanted = wanted_of(condition, repeat)
    watch = Watch(wanted, local_tests(experiment, running["data"]) if wanted.test_loss else {})
    return *_rounds(condition, experiment, watch, lambda: None, **running), watch, 0


def _rounds(
    condition: Condition,
    experiment: lab.Experiment,
    observer: Any,
    after: Callable[[], object],
    *,
    progress: Progress | None,
    **running: Any,
) -> tuple[lab.Result, list[Mapping[str, Any]]]:
    losses: list[Mapping[str, Any]] = []
    result = None
    for result in lab.rounds(experiment, observer, **running):
        losses.append(result.rounds[-1].losses if condition.every_iteration else {})
        after()
        if progress is not None:
            progress(len(result.rounds), condition.rounds)
    assert result is not None  # noqa: S101 - there is at least one round
    return result, losses


def local_tests(experiment: lab.Experiment, data: str | os.PathLike[str] | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each client's local test: samples and labels."""
    site = lab.Site.of(experiment, data)
    rows = {node: site.shard(node, 0).test for node in experiment.nodes}
    return {node: site.dataset.pairs(site.dataset.x[own], site.dataset.y[own]) for node, own in rows.items()}


def wanted_of(c: Condition, repeat: int) -> Wanted:
    """Return what is measured on a GPU: the paper's conditions at every iteration, and one repeat on the whole set."""
    by_edge = c.topology == "hierarchical"
    return Wanted(
        rounds=c.rounds,
        last=steps_of(c) - 1,
        iterations=c.iterations if c.every_iteration else 0,
        batches=c.batches,
        test_loss=by_edge and c.every_iteration and c.study not in WITHOUT_EDGES,
        images=IMAGES_ON_CUDA,
        images_each=IMAGES_ON_CUDA if c.scale_each else 0,
        by_group=by_edge,
        full_gradient=1 if c.whole_set else 0,
        full_gradient_each=WINDOW if c.whole_set and by_edge and c.every_iteration else (),
        nonlinearity=NLC_ROUNDS if c.study == "extended" else 0,
        whole_scale=c.study == "extended" and repeat == 0,
        exact_rounds=EXACT_ROUNDS if c.study == "extended" and repeat == 0 else (),
    )


def _images(c: Condition, *, arrays: bool) -> dict[str, int]:
    """Return the images per client for gradient scale: at the end of a round, and at each iteration."""
    here, each = (IMAGES_ON_CUDA, IMAGES_ON_CUDA) if arrays else (IMAGES, IMAGES_EACH)
    return {"round": here} | ({"iteration": each} if c.scale_each else {})


def _machine(device: str) -> str:
    return torch.cuda.get_device_name(device) if device != "cpu" else f"{os.cpu_count()} cores"


def experiment_of(condition: Condition, repeat: int) -> lab.Experiment:
    """Return the condition as an experiment of the lab."""
    c = condition
    clip = None if c.clip is None else lab.Clip(limit=c.clip, by="tensor" if c.clip_by == "norm" else "value")
    local = lab.Local(
        iterations=c.iterations * c.batches if c.epochs is None else None,
        epochs=c.epochs,
        batch=16,
        optimizer=lab.adam(learning_rate=c.learning_rate),
        clip=clip,
        keep_optimizer=c.keep_optimizer,
    )
    return lab.Experiment(
        name=c.name,
        dataset=c.dataset if c.scale_pixels or c.dataset != "gtsrb" else lab.gtsrb(divisor=1.0),
        partition=lab.natural() if c.by_track else lab.iid() if c.alpha is None else lab.dirichlet(c.alpha),
        model=model_of(c),
        local=local,
        clients=c.clients,
        rounds=c.rounds,
        topology=topology_of(c),
        faults=tuple(faults_of(c)),
        seed=SEED + repeat,
    )


def model_of(c: Condition) -> Any:
    if c.model == "paper-cnn":
        return lab.paper_cnn(
            scenario=c.scenario, channels=c.channels, kernel=c.kernel, slope=c.slope, dense=c.dense, pool=c.pool
        )
    networks = {"mlp": lab.mlp(hidden=(128,)), "resnet": lab.resnet18(norm="group"), "transformer": lab.transformer()}
    return PaperWeights(networks[c.model], c.scenario) if c.paper_weights else networks[c.model]


def faults_of(c: Condition) -> list[Any]:
    """Return drop-outs; and, for other networks than the paper's, the substitute for its scenarios: a wrong gain."""
    found = [lab.drop_out(nodes="all", rate=c.drop_out)] if c.drop_out else []
    if c.model != "paper-cnn" and c.scenario != "baseline" and not c.paper_weights:
        found.append(lab.exploding_initialisation() if c.scenario == "exploding" else lab.vanishing_initialisation())
    return found


def topology_of(c: Condition) -> Any:
    """Return the topology, with as many edges and rings per client as in the paper."""
    match c.topology:
        case "hierarchical":
            return lab.Hierarchical(edges=max(2, c.clients // 20), every=c.batches)
        case "rings":
            return lab.Rings(every=c.batches)
        case "clustered":
            return lab.Clustered()
    return lab.Centralized()


def steps_of(c: Condition) -> int:
    """Return the mini-batches of a client-round; 39,209 images distributed, a fifth of them kept for the local test."""
    return c.iterations * c.batches if c.epochs is None else math.ceil(c.epochs * (0.8 * 39_209 // c.clients) / 16)


def probes_of(c: Condition) -> Preset:
    """Return the probes that the figures need: at the last iteration of each round, or at every one."""
    step = always if c.every_iteration else at_step(steps_of(c) - 1)
    plan = [Planned(gradients, step, each=True), Planned(weights), Planned(scale(images=IMAGES))]
    if c.scale_each:
        plan.append(Planned(scale(images=IMAGES_EACH), always))
    plan.append(Planned(nonlinearity(), rounds=NLC_ROUNDS))
    if c.whole_set:
        # As expensive as the training itself: with every iteration measured as well, every fifth round is enough.
        plan.append(Planned(full_gradient, rounds=NLC_ROUNDS if c.every_iteration else 1))
    return Preset("study", tuple(plan), fit_percent=0.5, difference_each_step=c.every_iteration)


class CohortSums:
    """A sink that keeps the cohort's sums of each round (and step), and drops the clients."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._values: dict[tuple[str, int, int | None], list[float]] = defaultdict(lambda: [0.0, 0.0])  # sum, count
        self._rows: dict[tuple[str, int, int | None], Any] = {}  # nine sums per layer, summed over the clients
        self._edges: dict[tuple[str, str, int, int], float] = defaultdict(float)  # name, edge, round, step
        self._bytes: dict[tuple[str, int], int] = defaultdict(int)
        self._groups: dict[int, int] = {}
        self._layers: dict[str, list[int]] = {}  # table → the rows that are weights
        self.group_of: dict[str, str] = {}

    def write(self, records: Sequence[Record], /) -> None:
        for record in records:
            match record:
                case Run():
                    for table in record.tables:
                        names = [layer.name if hasattr(layer, "name") else str(layer) for layer in table.layers]
                        self._layers[table.digest] = [i for i, name in enumerate(names) if name.endswith("weight")]
                case Metric():
                    self._metric(record)
                case LayerStats() if record.family in ("gradient", "gradient.full") and _of_client(record.where.node):
                    self._gradient(record)
                case Transfer() if record.kind != "telemetry":  # of the topology, not of the monitoring
                    server = "server" in (record.sender, record.receiver)
                    self._bytes["server" if server else "edge", record.where.round or 0] += record.bytes
                case Event() if record.name == "groups":
                    self._groups[record.where.round or 0] = len(record.data)
                    for group, nodes in record.data.items():
                        self.group_of |= dict.fromkeys(nodes, group)
                case _:
                    pass

    def _metric(self, m: Metric) -> None:
        if not _of_client(m.where.node) or m.where.round is None or not math.isfinite(m.value):
            return
        if m.name.startswith(("scale.", "nonlinearity.")):
            held = self._values[m.name, m.where.round, m.where.step if self._condition.every_iteration else None]
            held[0] += m.value
            held[1] += 1
        elif m.name.startswith("weight.difference") and m.where.step is not None and m.where.group is not None:
            self._edges[m.name, m.where.group, m.where.round, m.where.step] += m.value

    def _gradient(self, stats: LayerStats) -> None:
        key = (stats.family, stats.where.round or 0, stats.where.step)
        chosen = self._layers.get(stats.table)
        if chosen is None:
            return
        rows = np.asarray(stats.matrix)[chosen][:, [COUNT, SUM, SUM_MAGNITUDES]]
        self._rows[key] = rows if key not in self._rows else self._rows[key] + rows

    def series(self) -> dict[str, Any]:
        """Return the series by name, as the figures need them."""
        c = self._condition
        last, rounds = steps_of(c) - 1, range(c.rounds)
        found: dict[str, Any] = {}
        for name in ("scale.gsc", "scale.gsc_median", "scale.gsc_spread", "scale.sensitivity", "nonlinearity.nlc"):
            found[name] = [self._mean(name, r, None) for r in rounds]
        for name in ("scale.zero_samples", "scale.nonfinite_samples"):
            shares = [(self._mean(name, r, None), self._mean("scale.images", r, None)) for r in rounds]
            found[name] = [part / whole if whole else math.nan for part, whole in shares]
        found |= self._layered("gradient", [(r, last) for r in rounds], "gradient")
        if c.whole_set:
            found |= self._layered("gradient.full", [(r, None) for r in rounds], "gradient.full")
        if c.every_iteration:
            places = [(r, step) for r in rounds for step in range(c.iterations)]
            found["iteration.gsc"] = [self._mean("scale.gsc", r, step) for r, step in places]
            found |= self._layered("gradient", places, "iteration.gradient")
            for name, told in (
                ("weight.difference", "difference"),
                ("weight.difference_absolute", "difference_absolute"),
            ):
                edges = sorted({edge for own, edge, _, _ in self._edges if own == name})
                found[f"iteration.{told}"] = {
                    e: [self._edges.get((name, e, *p), math.nan) for p in places] for e in edges
                }
        groups, known = [], 1
        for r in rounds:
            known = self._groups.get(r, known)
            groups.append(known)
        found["groups"] = groups
        found |= {f"bytes.{where}": [self._bytes[where, r] for r in rounds] for where in ("server", "edge")}
        return found

    def _mean(self, name: str, number: int, step: int | None) -> float:
        total, count = self._values.get((name, number, step), (0.0, 0))
        return total / count if count else math.nan

    def _layered(self, family: str, places: Iterable[tuple[int, int | None]], prefix: str) -> dict[str, Any]:
        rows = [self._rows.get((family, *place)) for place in places]
        layers = max((len(r) for r in rows if r is not None), default=0)
        found: dict[str, Any] = {f"{prefix}.mean": {}, f"{prefix}.magnitude": {}}
        for layer in range(layers):
            for column, name in ((1, "mean"), (2, "magnitude")):
                values = [math.nan if r is None else float(r[layer, column] / max(1.0, r[layer, 0])) for r in rows]
                found[f"{prefix}.{name}"][str(layer + 1)] = values
        return found


def _of_client(node: str | None) -> bool:
    return node is not None and node[0] == "c" and node[1:].isdigit()


def _evaluated(rounds: Sequence[lab.Round]) -> dict[str, list[float]]:
    names = {
        "server.accuracy": "accuracy",
        "server.loss": "loss",
        "aggregated.accuracy": "local.accuracy",
        "aggregated.loss": "local.loss",
    }
    return {told: [r.metrics.get(name, math.nan) for r in rounds] for told, name in names.items()}


def _losses(
    rounds: Sequence[Mapping[str, Any]], group_of: Mapping[str, str], batches: int = 1
) -> dict[str, list[float]]:
    """Return each edge's mean loss of the mini-batches of each iteration; without edges, the cohort's."""
    found: dict[str, list[float]] = {}
    for edge in sorted(set(group_of.values())) or [ALL]:
        found[edge] = []
        for losses in rounds:
            own = [values for node, values in losses.items() if group_of.get(node, ALL) == edge]
            found[edge] += torch.stack(own).double().mean(0).unflatten(0, (-1, batches)).mean(1).tolist()
    return found


def _plain(value: Any) -> Any:
    """Return the value for JSON: null if not finite, numbers with six digits."""
    match value:
        case Mapping():
            return {key: _plain(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_plain(entry) for entry in value]
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
