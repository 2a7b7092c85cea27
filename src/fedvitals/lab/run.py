# SPDX-License-Identifier: Apache-2.0
"""Run an experiment round by round: observed, saved, and reproducible to the last bit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab import tape_recording
from fedvitals.lab.checkpoint import Checkpoint
from fedvitals.lab.compression import Plain
from fedvitals.lab.corrections import CorrectionApplier
from fedvitals.lab.engines.engine import AnyEngine, Engine, single_threaded
from fedvitals.lab.engines.site import Site
from fedvitals.lab.experiment import Experiment
from fedvitals.lab.faults import table as fault_table
from fedvitals.lab.faults.fault import SampleForm
from fedvitals.lab.federation import Federation, ServerState
from fedvitals.lab.privacy import privacy_metrics, require_no_buffers
from fedvitals.protocols import Observed, Observer, observer_of

ROUNDS_WITH_LOSSES = 100  # newest rounds of a result; a long run must not exhaust memory


@dataclass(frozen=True, slots=True)
class Round:
    """The outcome of one round.

    Args:
        number: The round.
        seconds: How long it took.
        metrics: The server's metrics, such as its accuracy.
        losses: The losses of each client's local batches; kept of the newest rounds.
    """

    number: int
    seconds: float
    metrics: dict[str, float]
    # Of each client's local batches. Not kept on disk; in a `Result`, only the newest rounds have them.
    losses: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Result:
    """The outcome of an experiment: its model and its rounds.

    Args:
        experiment: What was run.
        model: The model with the last global weights; parameters that clients keep for themselves are as initialised.
        state: The same weights, flat, on the CPU.
        rounds: The outcome of each round.
        engine: The engine that trained it.
    """

    experiment: Experiment
    model: torch.nn.Module  # with the last global weights; what stays at clients' homes is as initialised
    state: Tensor  # the same, flat, on the CPU
    rounds: list[Round] = field(default_factory=list)
    engine: str = ""

    @property
    def accuracy(self) -> float | None:
        """The last accuracy on the test set, or None."""
        accuracies = [r.metrics["accuracy"] for r in self.rounds if "accuracy" in r.metrics]
        return accuracies[-1] if accuracies else None


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
    start: tuple[int, ServerState] | None = None,
    progress: Callable[[Round], None] | None = None,
) -> Result:
    """Run an experiment to its end.

    Args:
        experiment: What to run.
        observer: A `fv.Monitor`, or another observer; None: nothing is monitored.
        engine: The name of an engine («auto», «sequential», «reuse» or «stacked»), or a function that creates one
            for a site.
        workers: Processes that train clients.
        device: «cpu» or «cuda».
        precision: What products are computed in: «float32», «tf32» or «bfloat16».
        data: The folder of the data set.
        checkpoint: A folder into which the state is saved after every round.
        resume: Whether to continue from the checkpoint, bit for bit as if it had never stopped.
        start: A round to start from with the server's state before it, from another run's tape.
        progress: Called with each round when it is over.

    Returns:
        The result: the model, and each round's metrics.
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
    start: tuple[int, ServerState] | None = None,
) -> Iterator[Result]:
    """Run an experiment like `run`, but stop after each round.

    Args:
        experiment: What to run.
        observer: A `fv.Monitor`, or another observer; None: nothing is monitored.
        engine: The name of an engine («auto», «sequential», «reuse» or «stacked»), or a function that creates one
            for a site.
        workers: Processes that train clients.
        device: «cpu» or «cuda».
        precision: What products are computed in: «float32», «tf32» or «bfloat16».
        data: The folder of the data set.
        checkpoint: A folder into which the state is saved after every round.
        resume: Whether to continue from the checkpoint, bit for bit as if it had never stopped.
        start: A round to start from with the server's state before it, from another run's tape.

    Yields:
        After each round, the result so far.
    """
    watching = _check_call(experiment, observer, engine, checkpoint, resume=resume)
    _describe(watching, experiment)
    site = prepare_site(experiment, data)
    experiment = site.experiment
    saved = None if checkpoint is None else Checkpoint(Path(checkpoint), experiment)
    if saved is not None and resume and isinstance(engine, str):
        engine = saved.engine_for(engine)
    server, first = ServerState(site.layout.flat(site.module)), 0
    with Engine(site, engine, workers, device, precision) if isinstance(engine, str) else engine(site) as doing:
        model = site.server_module().cpu()
        result = Result(experiment, model, server.model, engine=doing.name)
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
        corrections = CorrectionApplier(experiment, watching, saved=saved is not None)
        _announce(federation, data, begins=first == 0 or start is not None)
        yield from _next_rounds(federation, corrections, range(first, experiment.rounds), result, saved)


def _next_rounds(
    federation: Federation,
    corrections: CorrectionApplier,
    numbers: Iterable[int],
    result: Result,
    saved: Checkpoint | None,
) -> Iterator[Result]:
    """Run rounds, and yield the result so far after each of them."""
    for number in numbers:
        if len(result.rounds) >= ROUNDS_WITH_LOSSES:
            result.rounds[-ROUNDS_WITH_LOSSES].losses.clear()
        with single_threaded():  # idle threads of torch in this process would take the workers' cores
            result.rounds.append(run_round(federation, corrections, number, result.model))
        result.state = federation.model_on_cpu()
        if saved is not None:
            saved.save(federation.server, number + 1, result.rounds, federation.engine.name)
        if federation.observer.recorder is not None:
            federation.observer.recorder.gate(number)
        yield result


def _describe(observer: Observer, experiment: Experiment) -> None:
    """Keep the experiment with the run of a plain monitor, so that it can be run again."""
    try:
        text = experiment.public_toml()
    except ConfigError:  # objects of the user's own
        return
    observer.experiment(text)


def _announce(federation: Federation, data: object, *, begins: bool) -> None:
    """Report what is known before the first round: planted faults, settings that differ from the request, how to
    re-run.
    """
    experiment, watching, engine = federation.experiment, federation.observer, federation.engine
    for fault in experiment.faults if begins else ():
        watching.truth(fault.truth(experiment.nodes))
    transformations = transformations_of(experiment)
    if transformations and begins:
        names = ", ".join(part.get("kind", name) for name, part in transformations.items())
        text = f"Updates are changed between training and aggregation: {names}."
        if experiment.secure_aggregation is not None:
            text += " Single updates are not visible."
        watching.event("info", "updates.transformed", text, data=transformations)
    fallback: str | None = getattr(engine, "fallback", None)
    if fallback is not None:
        watching.event("info", "device.fallback", fallback)
    if watching.recorder is not None:
        watching.recorder.describe(tape_recording.rerun_settings(experiment, engine, data))


def transformations_of(experiment: Experiment) -> dict[str, Any]:
    """Return what changes updates between training and aggregation, with its settings, by the part of the experiment.

    With `secure_aggregation` among them, the observer is never shown single updates.
    """
    parts = {name: getattr(experiment, name) for name in ("compression", "privacy", "secure_aggregation")}
    return {
        name: msgspec.to_builtins(part) if isinstance(part, msgspec.Struct) else {"kind": type(part).__name__}
        for name, part in parts.items()
        if part is not None and not isinstance(part, Plain)
    }


def prepare_site(experiment: Experiment, data: str | os.PathLike[str] | None = None) -> Site:
    """Return the experiment's data, partition and initial model with faults applied; raises ConfigError if it cannot be
    run.
    """
    site = Site.of(fault_table.apply_experiment(experiment), data)
    _check_faults(site)
    require_no_buffers(site)
    return site


def _check_call(
    experiment: object, observer: Observer | Observed | None, engine: object, checkpoint: object, *, resume: bool
) -> Observer:
    """Refuse what cannot be run. Returns the observer to call."""
    if not isinstance(experiment, Experiment):
        got = type(experiment).__name__
        raise ConfigError(f"lab.run() takes a lab.Experiment; got {got}. Of a file: lab.read(text).")
    if not isinstance(engine, str) and not callable(engine):
        raise ConfigError(f"The engine is a name, such as «auto», or a function that makes one; got {engine!r}.")
    watching = observer_of(observer)
    if resume and checkpoint is None:
        raise ConfigError("There is nothing to resume from: name the folder that was given as checkpoint=.")
    if checkpoint is not None and experiment.local.keep_optimizer:
        raise ConfigError(
            "A run with keep_optimizer cannot be saved: the clients' optimisers are not part of its state."
        )
    return watching


def _check_faults(site: Site) -> None:
    """Raise ConfigError if a fault names something that does not exist."""
    e, dataset = site.experiment, site.dataset
    changes = () if e.population is None else e.population.rounds_of_change(e.rounds)
    samples = SampleForm(dataset.shape, dataset.vocabulary is not None, dataset.targets)
    for fault in e.faults:
        nodes = e.nodes if fault_table.names_nodes_only(fault, e.nodes) else (*e.nodes, *site.groups)
        fault_table.check_fault(fault, nodes, site.layout, e.local.iterations, e.rounds, dataset.classes, samples)
        for node in e.nodes:
            if fault_table.any_active("data", (fault,), fault.since, node):
                for number in {fault.since, *changes}:
                    site.tensors(node, number)  # reports now a client that it would leave without samples


def run_round(
    federation: Federation,
    corrections: CorrectionApplier,
    round_index: int,
    model: torch.nn.Module,
    *,
    evaluate: bool = True,
) -> Round:
    """Run one round and return its outcome. With `evaluate=False` the new model is not evaluated, as in a replay."""
    server, site, observer, watch = federation.server, federation.site, federation.observer, federation.watch
    began = time.perf_counter()
    federation.round, federation.losses = round_index, {}
    actions = [*observer.prescribed(round_index)]
    federation.corrections = corrections.apply(actions, round_index, server)
    tape_recording.begin(federation, actions)
    site.layout.load(model, federation.model_on_cpu())
    observer.round_begin(round_index, model)
    if federation.experiment.population is not None:
        federation.experiment.population.announce(federation.experiment, round_index, observer)
    watch.start()
    after = federation.experiment.topology.round(federation)
    if not isinstance(after, Tensor) or after.shape != server.model.shape or after.dtype != server.model.dtype:
        got = f"{after.dtype} {tuple(after.shape)}" if isinstance(after, Tensor) else type(after).__name__
        raise ConfigError(
            f"A topology's round() gives the new model, {server.model.dtype} {tuple(server.model.shape)}; got {got}."
        )
    depth = fault_table.history_length(federation.experiment.faults)
    server.past = [*server.past, server.model][-depth:] if depth else []
    server.model = after.to(server.model.device)  # a user's own topology may have moved it
    site.layout.load(model, federation.model_on_cpu())
    watch.lap("aggregate")
    e = federation.experiment
    due = (round_index + 1) % e.evaluation.every == 0 or round_index + 1 >= e.rounds
    federation.close_clock(evaluated=due)
    watch.lap("measure")
    metrics = (_evaluate(federation) if due and evaluate else {}) | privacy_metrics(federation)
    watch.lap("evaluate")
    tape_recording.end(federation, metrics)
    watch.report(observer)
    observer.round_end(round_index, model, metrics)
    return Round(round_index, time.perf_counter() - began, metrics, federation.losses)


def _evaluate(federation: Federation) -> dict[str, float]:
    e, engine = federation.experiment, federation.engine
    metrics = {}
    if len(federation.site.dataset.test_y) and federation.site.home is None:  # else the server has no whole model
        metrics = mean_metrics(*engine.evaluate(federation.server.model), federation.site.loss.score_name)
    if e.evaluation.local and e.test_share:
        metrics |= _evaluate_locally(federation)
    successes = [engine.evaluate(federation.server.model, attack)[1] for attack in federation.site.attacks]
    if successes:
        metrics["attack.success"] = max(float(hits.double().mean()) for hits in successes)
    return metrics


def _evaluate_locally(federation: Federation) -> dict[str, float]:
    """Evaluate the clients' local tests, each with the model that the client would receive now, and report the
    metrics.
    """
    site, server, e, number = federation.site, federation.server, federation.experiment, federation.round
    topology = e.topology
    client_models = topology.models(federation) if hasattr(topology, "models") else {}
    cohort = federation.losses if e.evaluation.local == "cohort" else None
    tests = {node: len(site.shard(node, number).test) for node in e.members(number) if cohort is None or node in cohort}
    states = {node: client_models.get(node, server.model) for node, samples in tests.items() if samples}
    if not states:
        return {}
    states, homes = federation.client_models(states)
    losses, scores = (outcome.cpu() for outcome in federation.engine.evaluate_locally(states, number, homes))
    name = site.loss.score_name
    first = 0
    for node in states:
        last = first + tests[node]
        federation.observer.log(mean_metrics(losses[first:last], scores[first:last], name, "local."), node=node)
        first = last
    return mean_metrics(losses, scores, name, "local.")


def mean_metrics(losses: Tensor, scores: Tensor, name: str = "accuracy", prefix: str = "") -> dict[str, float]:
    """Return the mean loss, and under its name the mean score, from those of each sample."""
    return {f"{prefix}loss": float(losses.double().mean()), f"{prefix}{name}": float(scores.double().mean())}
