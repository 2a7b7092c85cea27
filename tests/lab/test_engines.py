# SPDX-License-Identifier: Apache-2.0
"""Three engines, one result: equal to rounding between them, to the last bit within one, watched or not."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.engines.engine import Engine
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Task
from fedvitals.lab.topologies.exchanges import average, pass_to_next
from fedvitals.monitor.monitor import Monitor
from fedvitals.protocols import NullObserver
from fedvitals.testing import MemorySink

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

ADAM = lab.Local(iterations=4, batch=8, optimizer=lab.adam(), clip=lab.Clip())
SETTINGS = {
    "plain": lab.Local(iterations=4, batch=8),
    "momentum": lab.Local(iterations=4, batch=8, optimizer=lab.sgd(learning_rate=0.05, momentum=0.9)),
    "adam, clipped": ADAM,
    "clipped as a whole": lab.Local(iterations=4, batch=8, clip=lab.Clip(0.1, "whole")),
    "clipped by value": lab.Local(iterations=4, batch=8, clip=lab.Clip(0.01, "value")),
    "proximal": lab.Local(iterations=4, batch=8, proximal=0.5),
    "weight decay": lab.Local(iterations=4, batch=8, optimizer=lab.sgd(0.05, 0.9, weight_decay=0.1)),
    "adam, weight decay": lab.Local(iterations=4, batch=8, optimizer=lab.adam(weight_decay=0.1)),
    "plain_sgd": lab.Local(iterations=4, batch=8, optimizer=lab.plain_sgd()),
    "accumulated, scheduled": lab.Local(iterations=4, batch=4, accumulate=3, schedule=lab.warmup(1)),
    "three epochs": lab.Local(epochs=3, batch=8),
    "epochs": lab.Local(epochs=1, batch=8),  # clients of different sizes take different numbers of steps
}


def experiment(**changes):
    small = {"dataset": lab.synthetic(samples=240), "model": "mlp", "clients": 6, "rounds": 2, "local": ADAM, "seed": 3}
    return lab.Experiment(**{**small, **changes})


@pytest.mark.parametrize("topology", ["centralized", "hierarchical", "rings"])
@pytest.mark.parametrize("name", SETTINGS)
def test_engines_agree(name, topology):
    """To 2e-5 of a weight after two rounds: sums are taken in another order, and Adam divides by their roots."""
    topology = lab.Hierarchical(edges=2) if topology == "hierarchical" else topology
    e = experiment(local=SETTINGS[name], topology=topology, partition=lab.quantity_skew())
    states = [lab.run(e, engine=engine, workers=1).state for engine in ("sequential", "reuse", "stacked")]
    start = Site.of(e)
    assert (states[0] - start.layout.flat(start.module)).abs().max() > 1e-3  # it did learn
    for other in states[1:]:
        torch.testing.assert_close(other, states[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("exchange", [average, pass_to_next])
def test_a_group_that_is_done_exchanges_no_more_while_others_train(exchange):
    """Every client's own state, not only their mean, is that of the twin."""
    e = experiment(local=lab.Local(epochs=2, batch=8), partition=lab.quantity_skew())
    site = Site.of(e)
    start = site.layout.flat(site.module)
    tasks = [Task(0, nodes, start, exchange=exchange) for nodes in (("c0", "c4", "c1"), ("c5", "c3", "c2"))]

    def states(name):
        with Engine(site, name, workers=1) as engine:
            return {u.node: u.state.clone() for batch in engine.train(tasks, NullObserver()) for u in batch}

    steps = [max(e.local.steps(site.samples(node)) for node in task.nodes) for task in tasks]
    assert steps[0] != steps[1]
    torch.testing.assert_close(states("stacked"), states("sequential"), rtol=0, atol=2e-5)


@pytest.mark.parametrize("model", ["cnn", "paper_cnn", "logistic", "lstm"])
def test_engines_agree_on_images(model):
    e = experiment(dataset="digits", model=model, clients=3)
    engines = ["sequential", "reuse", *([] if model == "lstm" else ["stacked"])]
    states = [lab.run(e, engine=engine, workers=1).state for engine in engines]
    for other in states[1:]:
        torch.testing.assert_close(other, states[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("engine", ["reuse", "stacked"])
@pytest.mark.parametrize(
    "topology", [lab.Centralized(), lab.Hierarchical(edges=3), lab.Rings(2), lab.Clustered(smallest=1)]
)
def test_the_number_of_workers_changes_no_bit(engine, topology, monkeypatch):
    monkeypatch.setattr(
        "fedvitals.lab.stacked.executor.STACK", 3
    )  # several stacks, so that the workers have something to share
    e = experiment(topology=topology)
    states = [lab.run(e, engine=engine, workers=workers).state for workers in (1, 2, 3)]
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


@pytest.mark.parametrize("engine", ["sequential", "reuse", "stacked"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_observer_changes_no_bit(engine, workers):
    e = experiment(faults=[lab.label_noise(nodes=["c1"], rate=1.0), lab.sign_flip(nodes=["c2"], since=1)])
    plain = lab.run(e, engine=engine, workers=workers)
    sink = MemorySink()
    with Monitor(None, sinks=[sink], probes="deep", strict=True) as monitor:
        watched = lab.run(e, monitor, engine=engine, workers=workers)
        assert monitor.flush()
    assert torch.equal(plain.state, watched.state)
    assert {r.where.node for r in sink.records if hasattr(r, "where")} >= set(e.nodes)


@pytest.mark.parametrize("engine", ["sequential", "reuse", "stacked"])
def test_what_is_recorded_does_not_depend_on_the_engine(engine):
    """Names of metrics per client; values are compared by the probes' own twins."""
    sink = MemorySink()
    with Monitor(None, sinks=[sink], strict=True) as monitor:
        lab.run(experiment(rounds=1), monitor, engine=engine, workers=2)
    names = {r.name for r in sink.records if type(r).__name__ == "Metric" and r.where.node == "c3"}
    assert {"gradient.norm", "weight.drift", "update.norm", "update.cosine_mean", "steps", "local.accuracy"} <= names


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_clients_that_train_by_epochs_tell_their_own_steps(engine):
    """Not those of the one with most data, for whom the others of a stack wait."""
    e = experiment(rounds=1, partition=lab.dirichlet(0.3), local=lab.Local(epochs=2, batch=8))
    sink = MemorySink()
    with Monitor(None, sinks=[sink], strict=True) as monitor:
        lab.run(e, monitor, engine=engine, workers=1)
    told = {node: sink.value("steps", node=node) for node in e.nodes}
    assert told == {node: e.local.steps(int(sink.value("samples", node=node))) for node in e.nodes}
    assert len({*told.values()}) > 1


def test_a_client_that_fails_is_left_out_and_the_run_goes_on():
    e = experiment(faults=[lab.crash(nodes=["c2"], at_step=1)])
    for engine in ("sequential", "reuse", "stacked"):
        sink = MemorySink()
        with Monitor(None, sinks=[sink], strict=True) as monitor:
            result = lab.run(e, monitor, engine=engine, workers=2)
        failed = [r for r in sink.records if type(r).__name__ == "Event" and r.name == "client.failed"]
        assert {r.where.node for r in failed} == {"c2"}, engine
        assert torch.isfinite(result.state).all()


@pytest.mark.parametrize("optimizer", [lab.adam(), lab.sgd(learning_rate=0.05, momentum=0.9)], ids=["adam", "momentum"])
def test_what_a_client_keeps_of_its_optimiser_is_of_its_own_steps(optimizer):
    """Not of those for which it waits while others of its stack still train, nor of those after its failure."""
    local = lab.Local(epochs=1, batch=8, optimizer=optimizer, keep_optimizer=True)
    crash = lab.crash(nodes=["c2"], at_step=1)
    e = experiment(local=local, partition=lab.dirichlet(0.3), faults=[crash])
    site = Site.of(e)
    start = site.layout.flat(site.module)

    def kept(*nodes):
        with Engine(site, "stacked", workers=1) as engine:
            for number in range(2):
                list(engine.train([Task(number, (node,), start) for node in nodes], NullObserver()))
            return engine._executor.kept

    together = kept(*e.nodes)
    assert len({steps for _, steps in together.values()}) > 2
    assert together["c2"][1] == 2  # one step in each round
    for node in e.nodes:
        moments, steps = kept(node)[node]
        assert together[node][1] == steps
        torch.testing.assert_close(together[node][0], moments, rtol=1e-4, atol=1e-6)


class _Dying:
    """A model of the user's own that kills its process when it meets its time."""

    def __init__(self, flag, die):
        self.flag, self.die = flag, die

    def __call__(self):
        flag, die = self.flag, self.die

        class Dies(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(32, 10)

            def forward(self, x):
                if self.training and Path(flag).exists():
                    with contextlib.suppress(FileNotFoundError):  # the other worker took it
                        Path(flag).rename(f"{flag}.taken")
                        die()
                return self.layer(x)

        return Dies()


@pytest.mark.parametrize(
    ("die", "issue", "kind", "words"),
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), "OUT_OF_MEMORY", "WorkerKilled", "was killed (signal 9)"),
     (lambda: os._exit(3), "CRASH", "WorkerDied", "died (exit code 3)")],
)  # fmt: skip
def test_a_worker_that_dies_is_replaced_and_its_client_failed(tmp_path, die, issue, kind, words):
    """Killed as the kernel does it is memory, in words of its own; any other end is a crash."""
    flag = tmp_path / "die"
    e = experiment(model=lab.Own(_Dying(str(flag), die)), rounds=3)
    sink = MemorySink()
    with Monitor(None, sinks=[sink], strict=True) as monitor:
        run = lab.rounds(e, monitor, engine="reuse", workers=2)
        next(run)
        flag.touch()
        results = list(run)
        (found,) = [one for one in monitor.findings() if one.issue in ("OUT_OF_MEMORY", "CRASH")]
    assert len(results[-1].rounds) == 3
    assert not flag.exists()
    died = [r for r in sink.records if type(r).__name__ == "Event" and r.name == "client.failed"]
    assert len(died) == 1
    assert died[0].where.round == 1
    assert f"worker process {words}" in died[0].message
    assert died[0].data["exception"] == kind
    assert (found.issue, found.where.node) == (issue, died[0].where.node)
    assert ("killed" in found.message) == (issue == "OUT_OF_MEMORY")


def test_updates_come_in_order_whoever_finishes_first():
    site = Site.of(experiment(partition=lab.quantity_skew(), local=lab.Local(epochs=3)))
    start = site.layout.flat(site.module)
    tasks = [Task(0, (node,), start) for node in site.experiment.nodes]
    with Engine(site, "reuse", 3) as engine:
        assert [u.node for batch in engine.train(tasks, NullObserver()) for u in batch] == list(site.experiment.nodes)
        (first,) = next(iter(engine.train(tasks, NullObserver())))  # whoever stops listening leaves nothing behind
        assert first.node == "c0"
        assert [u.node for batch in engine.train(tasks, NullObserver()) for u in batch] == list(site.experiment.nodes)


def test_the_engine_is_chosen_by_measuring():
    assert Engine(Site.of(experiment(clients=40, dataset=lab.synthetic(samples=2000)))).name == "stacked"
    with Engine(Site.of(experiment(dataset="digits", model="lstm", clients=3))) as engine:
        assert engine.name == "reuse"  # it cannot be stacked


def test_wrong_engines_are_answered():
    site = Site.of(experiment())
    with pytest.raises(ConfigError, match="Did you mean 'stacked'"):
        Engine(site, "staked")
    with pytest.raises(ConfigError, match="cuda"):
        Engine(site, "reuse", device="cuda")
    with pytest.raises(ConfigError, match="cannot be stacked"):
        lab.run(experiment(dataset="digits", model="lstm"), engine="stacked", workers=1)
    with pytest.raises(ConfigError, match="workers"):
        Engine(site, "reuse", -1)
