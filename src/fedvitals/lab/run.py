# SPDX-License-Identifier: Apache-2.0
"""The loop: round after round, watched, saved, and the same to the last bit whenever it is run again."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab import taped
from fedvitals.lab.actions import Ward
from fedvitals.lab.checkpoint import Checkpoint
from fedvitals.lab.engines.engine import AnyEngine, Engine, one_thread
from fedvitals.lab.engines.site import Site
from fedvitals.lab.experiment import Experiment
from fedvitals.lab.faults import table as ill
from fedvitals.lab.federation import Federation, Server
from fedvitals.protocols import Observed, Observer, observer_of


@dataclass(frozen=True, slots=True)
class Round:
    """How one round went."""

    number: int
    seconds: float
    metrics: dict[str, float]
    losses: dict[str, Tensor] = field(default_factory=dict)  # of each client's local batches; not kept on disk


@dataclass
class Result:
    experiment: Experiment
    model: torch.nn.Module  # with the last global weights
    state: Tensor  # the same, flat, on the CPU
    rounds: list[Round] = field(default_factory=list)
    engine: str = ""

    @property
    def accuracy(self) -> float | None:
        """On the test set, when it was last looked at."""
        found = [r.metrics["accuracy"] for r in self.rounds if "accuracy" in r.metrics]
        return found[-1] if found else None


def run(
    experiment: Experiment,
    observer: Observer | Observed | None = None,
    *,
    engine: str | Callable[[Site], AnyEngine] = "auto",
    workers: int | None = None,
    device: str = "cpu",
    precision: str = "float32",
    data: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    start: tuple[int, Server] | None = None,
    progress: Callable[[Round], None] | None = None,
) -> Result:
    """Run an experiment to its end.

    `engine`: the name of one, or what makes one of the experiment's site. `device`: «cpu» or «cuda»; `precision`: what
    products are computed in there, «float32», or «tf32» or «bfloat16». `data`: the folder of its data set.
    `checkpoint`: a folder in which the state is saved after every round; with `resume` the run goes on from there, bit
    for bit as if it had never stopped. `start`: a round to begin from, and all that is known before it: of another
    run's tape. `progress` hears of every round.
    """
    result = None
    for result in rounds(
        experiment,
        observer,
        engine=engine,
        workers=workers,
        device=device,
        precision=precision,
        data=data,
        checkpoint=checkpoint,
        resume=resume,
        start=start,
    ):
        if progress is not None and result.rounds:
            progress(result.rounds[-1])
    assert result is not None  # noqa: S101 - an experiment has at least one round
    return result


def rounds(
    experiment: Experiment,
    observer: Observer | Observed | None = None,
    *,
    engine: str | Callable[[Site], AnyEngine] = "auto",
    workers: int | None = None,
    device: str = "cpu",
    precision: str = "float32",
    data: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    start: tuple[int, Server] | None = None,
) -> Iterator[Result]:
    """The same, one round at a time: the result so far, after each."""
    watching = _check_call(experiment, observer, checkpoint, resume=resume)
    site = prepared(experiment, data)
    experiment = site.experiment
    saved = None if checkpoint is None else Checkpoint(Path(checkpoint), experiment)
    if saved is not None and resume and isinstance(engine, str):
        engine = saved.engine_for(engine)
    server, first = Server(site.layout.flat(site.module)), 0
    with Engine(site, engine, workers, device, precision) if isinstance(engine, str) else engine(site) as doing:
        result = Result(experiment, copy.deepcopy(site.module).cpu(), server.model, engine=doing.name)
        if saved is not None and resume:
            saved.engine_for(doing.name)
            server, first, result.rounds = saved.load(server)
        elif start is not None:
            first, server = start
        if first >= experiment.rounds:
            result.state = server.model.cpu()
            site.layout.load(result.model, result.state)
            yield result
            return
        federation = Federation(site, doing, watching, server)
        ward = Ward(experiment, watching, saved=saved is not None)
        _announce(federation, data, begins=first == 0 or start is not None)
        for number in range(first, experiment.rounds):
            with one_thread():  # idle threads of torch in this process would take the workers' cores
                result.rounds.append(one_round(federation, ward, number, result.model))
            result.state = federation.model_at_home()
            if saved is not None:
                saved.save(server, number + 1, result.rounds, doing.name)
            if watching.recorder is not None:
                watching.recorder.gate(number)
            yield result


def _announce(federation: Federation, data: object, *, begins: bool) -> None:
    """What is to be known before the first round: what is wrong here, what is not done as asked, how to do it again."""
    experiment, watching, engine = federation.experiment, federation.observer, federation.engine
    for fault in experiment.faults if begins else ():
        watching.truth(fault.truth(experiment.nodes))
    fallback: str | None = getattr(engine, "fallback", None)
    if fallback is not None:
        watching.event("info", "device.fallback", fallback)
    if watching.recorder is not None:
        watching.recorder.describe(taped.setting(experiment, engine, data))


def prepared(experiment: Experiment, data: str | os.PathLike[str] | None = None) -> Site:
    """The experiment's data, shares and first model, as its faults set it up; what cannot be run is refused here."""
    site = Site.of(ill.apply_experiment(experiment), data)
    _check_faults(site)
    return site


def _check_call(
    experiment: object, observer: Observer | Observed | None, checkpoint: object, *, resume: bool
) -> Observer:
    """Refuse what cannot be run. Returns the observer to call."""
    if not isinstance(experiment, Experiment):
        got = type(experiment).__name__
        raise ConfigError(f"lab.run() takes a lab.Experiment; got {got}. Of a file: lab.read(text).")
    watching = observer_of(observer)
    if resume and checkpoint is None:
        raise ConfigError("There is nothing to resume from: name the folder that was given as checkpoint=.")
    if checkpoint is not None and experiment.local.keep_optimizer:
        raise ConfigError(
            "A run with keep_optimizer cannot be saved: the clients' optimisers are no part of its state."
        )
    return watching


def _check_faults(site: Site) -> None:
    """Whatever a fault names must be there, before anything runs."""
    e = site.experiment
    for fault in e.faults:
        ill.check(fault, e.nodes, site.layout, e.local.iterations, e.rounds, site.dataset.classes)
        for node in e.nodes:
            if ill.any_at("data", (fault,), fault.since, node):
                site.tensors(node, fault.since)  # a client that it would leave without samples is told now


def one_round(
    federation: Federation, ward: Ward, number: int, model: torch.nn.Module, *, examined: bool = True
) -> Round:
    """`examined`: whether the new model is tested, where its turn is; a replay may do without."""
    server, site, observer, watch = federation.server, federation.site, federation.observer, federation.watch
    began = time.perf_counter()
    federation.round, federation.losses = number, {}
    actions = [*observer.prescribed(number)]
    federation.orders = ward.follow(actions, number, server)
    taped.begin(federation, actions)
    site.layout.load(model, federation.model_at_home())
    observer.round_begin(number, model)
    watch.start()
    after = federation.experiment.topology.round(federation)
    if not isinstance(after, Tensor) or after.shape != server.model.shape or after.dtype != server.model.dtype:
        got = f"{after.dtype} {tuple(after.shape)}" if isinstance(after, Tensor) else type(after).__name__
        raise ConfigError(
            f"A topology's round() gives the new model, {server.model.dtype} {tuple(server.model.shape)}; got {got}."
        )
    depth = ill.remembers(federation.experiment.faults)
    server.past = [*server.past, server.model][-depth:] if depth else []
    server.model = after.to(server.model.device)  # a topology of one's own may have gone home with it
    site.layout.load(model, federation.model_at_home())
    watch.lap("aggregate")
    due = _evaluation_due(federation.experiment, number)
    federation.close_clock(evaluated=due)
    watch.lap("measure")
    metrics = _evaluate(federation) if due and examined else {}
    watch.lap("evaluate")
    taped.end(federation, metrics)
    watch.tell(observer)
    observer.round_end(number, model, metrics)
    return Round(number, time.perf_counter() - began, metrics, federation.losses)


def _evaluation_due(experiment: Experiment, number: int) -> bool:
    return (number + 1) % experiment.evaluation.every == 0 or number + 1 >= experiment.rounds


def _evaluate(federation: Federation) -> dict[str, float]:
    e, engine = federation.experiment, federation.engine
    metrics = {}
    if len(federation.site.dataset.test_y):
        losses, hits = engine.examine(federation.server.model)
        metrics = {"loss": float(losses.double().mean()), "accuracy": float(hits.double().mean())}
    if e.evaluation.local and e.test_share:
        metrics |= _evaluate_locally(federation)
    return metrics


def _evaluate_locally(federation: Federation) -> dict[str, float]:
    """On every client's local test, each with the model that it would be given now."""
    shards, server = federation.site.shards, federation.server
    own = federation.experiment.topology
    given = own.models(federation) if hasattr(own, "models") else {}
    states = {node: given.get(node, server.model) for node in shards if len(shards[node].test)}
    if not states:
        return {}
    losses, hits = (found.cpu() for found in federation.engine.examine_locally(states))
    first = 0
    for node in states:
        last = first + len(shards[node].test)
        federation.observer.log(
            {
                "local.loss": float(losses[first:last].double().mean()),
                "local.accuracy": float(hits[first:last].double().mean()),
            },
            node=node,
        )
        first = last
    return {"local.loss": float(losses.double().mean()), "local.accuracy": float(hits.double().mean())}
