# SPDX-License-Identifier: Apache-2.0
"""A tiny federation, and checks of the contracts of probes, sinks, detectors and topologies."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.measurements import stamped
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.view import View
from fedvitals.protocols import Detector, NullObserver, Probe, RecordWriter, name_of
from fedvitals.records import (
    Action,
    Event,
    Finding,
    Layer,
    LayerStats,
    LayerTable,
    Metric,
    Record,
    Run,
    Sketch,
    Snapshot,
    Span,
    Suspect,
    Transfer,
    Truth,
    Where,
)
from fedvitals.stats import FAMILIES, empty_sums
from fedvitals.store import MemoryStore
from fedvitals.testing.memory_sink import MemorySink
from fedvitals.transport.sink_adapter import as_sink


def tiny_run(
    store: str | os.PathLike[str] | None = None,
    *,
    clients: int = 4,
    rounds: int = 3,
    steps: int = 5,
    seed: int = 0,
    **settings: Any,
) -> Monitor:
    """Run a federation of well under two seconds, monitored to its end.

    An MLP learns three classes of eight synthetic features, by plain averaging. Clients are «c0», «c1», ...

    Args:
        store: The file of the store; None: records go to the sinks alone.
        clients: The number of clients.
        rounds: The number of rounds.
        steps: The local steps of a client in a round.
        seed: The seed of the data and the model.
        settings: Settings of `fv.Monitor`, such as `sinks` and `probes`.

    Returns:
        The monitor, closed; its `run` is the run.
    """
    stream = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, 8, generator=stream)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shared = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    data = []
    for _ in range(clients):
        y = torch.randint(0, 3, (40,), generator=stream)
        data.append((centres[y] + 0.5 * torch.randn(40, 8, generator=stream), y))
    with Monitor(store, **{"run": "tiny", "seed": seed, **settings}) as monitor:
        for number in range(rounds):
            with monitor.round(number, shared):
                states = [_train(monitor, f"c{i}", shared, x, y, steps) for i, (x, y) in enumerate(data)]
                mean = {key: torch.stack([state[key] for state in states]).mean(0) for key in states[0]}
                shared.load_state_dict(mean)
            monitor.log(accuracy=_accuracy(shared, data))
    return monitor


def check_probe(probe: Probe, models: Iterable[tuple[nn.Module, Tensor, Tensor]] | None = None) -> None:
    """Check that a probe gives numbers by name, the same each time, and leaves the model and random streams unchanged.

    Args:
        probe: The probe.
        models: Triples (model, inputs, labels), whose gradients the check computes; without them, an MLP is used.

    Raises:
        AssertionError: The probe breaks its contract, and how.
    """
    _require(callable(probe), f"A probe is a function of a View, got {probe!r}.")
    if models is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            models = [
                (nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)), torch.randn(6, 8), torch.arange(6) % 3)
            ]
    for model, x, y in models:
        functional.cross_entropy(model(x), y).backward()
        before = _fingerprint(model)
        view = View(model, round_index=0, node="c0", data=(x, y), loss=functional.cross_entropy)
        first, second = probe(view), probe(view)
        _require(_fingerprint(model) == before, f"{name_of(probe)} changed the model, its hooks or a random stream.")
        _check_numbers(probe, first, view)
        same = first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
        _require(same, f"{name_of(probe)} gave other numbers for the same view the second time.")
        _without_gradients(probe, view)


def check_sink(make_sink: Callable[[], RecordWriter]) -> None:
    """Check that a sink takes every kind of record, in batches of any size, twice, from another thread, and closes.

    Args:
        make_sink: A function without arguments that makes a new sink.

    Raises:
        AssertionError: The sink breaks its contract, and how.
    """
    sink = make_sink()
    _require(isinstance(sink, RecordWriter), f"A sink has write(records), {type(sink).__name__} has not.")
    examples = examples_of_records()
    batch = list(examples)
    failure: list[BaseException] = []

    def deliver() -> None:
        try:
            sink.write(batch)
            sink.write(batch)  # a retry although the first attempt succeeded
            for record in examples:
                sink.write([record])
            sink.write([])
            as_sink(sink).close()
        except BaseException as error:  # noqa: BLE001 - passed to the caller's thread
            failure.append(error)

    worker = threading.Thread(target=deliver, name="check_sink")
    worker.start()
    worker.join(30)
    _require(not worker.is_alive(), f"{type(sink).__name__} did not come back within 30 s.")
    if failure:
        raise AssertionError(f"{type(sink).__name__} refused what a run may hold: {failure[0]!r}") from failure[0]
    _require(batch == examples, f"{type(sink).__name__} changed the list of records that it was handed.")


def check_detector(detector: Detector) -> None:
    """Check that a detector is pure: silent without history, the same twice, and with well-formed findings.

    Args:
        detector: The detector.

    Raises:
        AssertionError: The detector breaks its contract, and how.
    """
    _require(callable(detector), f"A detector is a function (history, round), got {detector!r}.")
    findings = list(detector(MemoryStore().history("nothing"), 0))
    _require(not findings, f"{name_of(detector)} finds something in a run without records: {findings}")
    sink, store = MemorySink(), MemoryStore()
    run = tiny_run(sinks=[sink], clients=3).run
    store.write(sink.records)
    for number in range(3):
        first = list(detector(store.history(run.id), number))
        second = list(detector(store.history(run.id), number))
        _require(
            first == second, f"{name_of(detector)} is not pure: other findings the second time, or other times `at`."
        )
        for finding in first:
            _check_finding(detector, finding, run.id)


def check_topology(topology: Any) -> None:
    """Check that a topology of the lab gives a model in every round, the same each time, whoever takes part or fails.

    Twelve clients learn three synthetic classes, on a network if the topology requires one. A single client may be
    refused, with a ConfigError that says why.

    Args:
        topology: The topology, an object with `check(experiment)` and `round(federation)`.

    Raises:
        AssertionError: The topology breaks its contract, and how.
    """
    name, watched, half = type(topology).__name__, _Traffic(), _Traffic()
    for method in ("check", "round"):
        there = callable(getattr(topology, method, None)) and not isinstance(topology, type)
        _require(there, f"{name}: a topology is an object with check(experiment) and round(federation).")
    whole = _lab_experiment(topology)
    site = lab.Site.of(whole)
    start = site.layout.flat(site.module)
    trained = _lab_run(whole, watched)
    got, wanted = ((list(model.shape), model.dtype) for model in (trained, start))
    _require(got == wanted, f"{name}: the model is {got} after a round, not {wanted}.")
    _require(bool(trained.isfinite().all()), f"{name}: the model is not finite after training on harmless data.")
    _require(not torch.equal(trained, start), f"{name}: nothing was learnt in 3 rounds.")
    _require(torch.equal(trained, _lab_run(whole)), f"{name}: other weights the second time, from the same seed.")
    _check_traffic(name, watched)
    apart = float((trained - _lab_run(whole, engine="stacked", workers=1)).abs().max())
    _require(
        apart < 1e-3, f"{name}: engines disagree by {apart:.2g}. A state is valid until the next: clone what you keep."
    )
    # Its state must be in the server's memory and notes in order to be saved
    with tempfile.TemporaryDirectory() as folder:
        next(lab.rounds(whole, engine="sequential", checkpoint=folder))
        resumed = _lab_run(whole, checkpoint=folder, resume=True)
    _require(torch.equal(trained, resumed), f"{name}: other weights after going on from a saved round.")
    _lab_run(_lab_experiment(topology, participation=0.5), half)
    for nodes, *_ in half.rounds:
        _require(len(nodes) == len(set(nodes)), f"{name}: a client trained twice in one round: {nodes}")
        _require(len(nodes) < whole.clients, f"{name}: all clients train, though only half take part: use cohort().")
    left = _lab_run(_lab_experiment(topology, faults=[lab.Crash(nodes=["c1"])]))
    _require(bool(left.isfinite().all()), f"{name}: the model is not finite after one client failed.")
    left = _lab_run(_lab_experiment(topology, faults=[lab.Crash(nodes="all")]))
    _require(torch.equal(left, start), f"{name}: the model changed, though all clients failed.")
    with contextlib.suppress(ConfigError):
        _lab_run(_lab_experiment(topology, clients=1))


def examples_of_records(run: str = "example") -> list[Record]:
    """Return one record of each kind, with all the awkward values that are legal: NaN, infinity, None, any script.

    Args:
        run: The id of the run that they belong to.
    """
    where, at = Where(run, 1, "c7", 3, None, "edge-2"), 1.7e9
    table = LayerTable("parameter", (Layer("fc.weight", (3, 8), "float32"), Layer("fc.bias", (3,), "float32")))
    matrix = empty_sums(2)
    matrix[0] = 24, -1.5, 1e30, 3, -2, float(np.finfo(np.float32).max), 0, 1, 2
    records: list[Record] = [
        Run(run, "a naïve run «ü»", config={"lr": 0.1}, seed=1, started=at, versions={"torch": "2"}, tables=(table,)),
        Metric(where, at, "loss", 0.5),
        Metric(where, at, "user.ratio", float("nan")),
        Metric(Where(run), at, "accuracy", float("-inf")),
        LayerStats(where, at, "gradient", matrix, table.digest),
        Span(where, at, "client", 0.25, "0" * 32, "1" * 16, None, {"failed": False}),
        Transfer(where, at, "c7", "server", 10**12, 10**12, None),
        Event(where, at, "warning", "log", "it's «quoted»\n\N{SNOWMAN}", {"nested": {"list": [1, None, True]}}),
        Sketch(where, at, tuple(float(i) for i in range(256))),
        Finding(where, at, "label_flip", "critical", 0.9, "c7 stands out", {"z": 4.2}, (Suspect("c7", 0.9, "loss"),)),
        Action(where, at, "label_flip", "exclude", "c7", {"rounds": 3}),
        Snapshot(where, at, "global", "ab" * 16, 1024),
        Truth(Where(run), at, "label_noise", ("c7",), 2, None, {"family": "client", "rate": 0.8}),
    ]
    return [stamped(record, "example", i) for i, record in enumerate(records)]


def _train(monitor: Monitor, node: str, shared: nn.Module, x: Tensor, y: Tensor, steps: int) -> Mapping[str, Tensor]:
    model = copy.deepcopy(shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor.client(node, model, optimizer, data=(x, y), loss=functional.cross_entropy):
        for step in range(steps):
            part = slice(8 * step % 40, 8 * step % 40 + 8)
            optimizer.zero_grad()
            functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
        monitor.transfer(node, "server", sum(4 * p.numel() for p in model.parameters()))
    return model.state_dict()


def _accuracy(model: nn.Module, data: Sequence[tuple[Tensor, Tensor]]) -> float:
    with torch.no_grad():
        return float(torch.cat([model(x).argmax(1) == y for x, y in data]).double().mean())


def _fingerprint(model: nn.Module) -> Any:
    """Return everything that a probe must not touch, in a comparable form."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]  # noqa: SLF001
    numpy_state = [str(part) for part in np.random.get_state()]  # noqa: NPY002 - the user's stream
    streams = (torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state)
    values = [t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    return values, [m.training for m in model.modules()], hooks, streams


def _check_numbers(probe: Probe, numbers: Any, view: View) -> None:
    name = name_of(probe)
    _require(
        isinstance(numbers, Mapping), f"{name} must return a mapping of name to number, got {type(numbers).__name__}."
    )
    rows = {"parameter": len(view.parameters), "buffer": len(view.named_buffers)}
    for key, value in numbers.items():
        _require(isinstance(key, str) and key, f"{name}: names are words, got {key!r}.")
        try:
            array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{name}: '{key}' is no number or array: {value!r}") from error
        if array.ndim == 0:
            continue
        _require(key in FAMILIES, f"{name}: '{key}' is an array, but no family. Known: {', '.join(FAMILIES)}.")
        family = FAMILIES[key]
        wanted = (rows.get(family.rows, len(array)), len(family.columns))
        _require(array.shape == wanted, f"{name}: '{key}' has shape {array.shape}, its family wants {wanted}.")


def _without_gradients(probe: Probe, view: View) -> None:
    """Check the probe without gradients, as for frozen and unused parameters, and without data."""
    for parameter in view.parameters:
        parameter.grad = None
    try:
        probe(View(view.model))
    except Exception as error:
        raise AssertionError(f"{name_of(probe)} fails without gradients, data and loss: {error!r}") from error


def _check_finding(detector: Detector, finding: Any, run: str) -> None:
    name = name_of(detector)
    _require(isinstance(finding, Finding), f"{name} must yield Findings, got {type(finding).__name__}.")
    _require(finding.where.run == run, f"{name}: a finding is about run {finding.where.run!r}, not {run!r}.")
    known = ("note", "warning", "critical")
    _require(finding.severity in known, f"{name}: severity {finding.severity!r} is none of {', '.join(known)}.")
    _require(0 <= finding.confidence <= 1, f"{name}: confidence {finding.confidence} lies outside 0..1.")
    _require(finding.issue and finding.message, f"{name}: a finding needs an issue and a message.")


class _Traffic(NullObserver):
    """Records who trained, sent and received, round by round."""

    def __init__(self) -> None:
        self.rounds: list[tuple[list[str], set[str], set[str]]] = []

    def round_begin(self, *_: Any, **__: Any) -> None:
        self.rounds.append(([], set(), set()))

    def expect(self, *nodes: str) -> None:
        self.rounds[-1][0].extend(nodes)

    def transfer(self, sender: str, receiver: str, *_: Any, **__: Any) -> None:
        self.rounds[-1][1].add(sender)
        self.rounds[-1][2].add(receiver)


def _lab_experiment(topology: Any, **changes: Any) -> lab.Experiment:
    data, local = lab.Synthetic(samples=360, features=6, classes=3), lab.Local(iterations=3, batch=8)
    settings: dict[str, Any] = {"clients": 12, "rounds": 3, "dataset": data, "model": "logistic", "local": local}
    settings |= {"evaluation": lab.Evaluation(every=3), **changes}
    try:
        return lab.Experiment(topology=topology, **settings)
    except ConfigError:
        return lab.Experiment(topology=topology, network=lab.Network(spread=1.0), **settings)


def _check_traffic(name: str, watched: _Traffic) -> None:
    for nodes, *ends in watched.rounds:
        _require(nodes, f"{name}: nobody trained in a round, though all clients are there.")
        for way, known in zip(("from", "to"), ends, strict=True):
            silent = ", ".join(sorted(set(nodes) - known))
            _require(not silent, f"{name}: {silent} trained, but no transfer {way} there was announced.")


def _lab_run(experiment: lab.Experiment, observer: NullObserver | None = None, **how: Any) -> Tensor:
    try:
        return lab.run(experiment, observer, **{"engine": "sequential", **how}).state
    except Exception as error:
        raise AssertionError(f"{experiment.topology!r} did not come to its end: {error!r}") from error


def _same(a: Any, b: Any) -> bool:
    first, second = (np.asarray(v.detach().cpu() if isinstance(v, Tensor) else v, dtype=np.float64) for v in (a, b))
    return np.array_equal(first, second, equal_nan=True)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)
