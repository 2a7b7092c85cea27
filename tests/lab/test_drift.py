# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD, FedDyn and FedNova against slow twins in numpy, and what they are for: the optimum of unequal clients."""

import numpy as np
import pytest
import torch
from torch import nn

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.corrections import ActiveCorrections, robust_aggregator
from fedvitals.lab.engines.site import Site
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Action, Where
from fedvitals.testing import MemorySink

FEATURES, CLASSES = 4, 3
ENGINES = ("sequential", "reuse", "stacked")


def experiment(**changes):
    settings = {
        "dataset": lab.synthetic(samples=120, features=FEATURES, classes=CLASSES),
        "partition": lab.dirichlet(0.5),
        "model": "logistic",
        "clients": 4,
        "rounds": 4,
        "test_share": 0.0,
        "local": lab.Local(epochs=2, batch=8, optimizer=lab.sgd(0.2)),
        "seed": 3,
    }
    return lab.Experiment(**{**settings, **changes})


# -- twins: a logistic regression in float64, by the papers' pseudo-code ----------------------------------------------


class Twin:
    """The federation of an experiment, whose cohorts are those that the lab drew."""

    def __init__(self, e, result):
        self.e, self.site = e, Site.of(e)
        self.cohorts = [[*r.losses] for r in result.rounds]
        self.start = self.site.layout.flat(self.site.module).double().numpy()

    def gradient(self, w, x, y):
        cut = FEATURES * CLASSES
        logits = x @ w[:cut].reshape(CLASSES, FEATURES).T + w[cut:]
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        return np.concatenate([(p.T @ x).ravel(), p.sum(0)]) / len(y)

    def steps(self, node):
        return self.e.local.steps(self.site.samples(node))

    def train(self, number, node, start, shift=0.0, pull=0.0):
        x, y = (t.numpy() for t in self.site.tensors(node, number))
        order = self.site.order(node, number, self.steps(node), self.e.local.batch, len(y)).numpy()
        w, velocity = start.copy(), np.zeros_like(start)
        for rows in order:
            g = self.gradient(w, x[rows].astype(np.float64), y[rows]) + shift + pull * (w - start)
            velocity = self.e.local.optimizer.momentum * velocity + g
            w = w - self.e.local.optimizer.learning_rate * velocity
        return w

    def scaffold(self, server_rate=1.0):
        x, rate, clients = self.start, self.e.local.optimizer.learning_rate, self.e.clients
        c, own = np.zeros_like(x), {node: np.zeros_like(x) for node in self.e.nodes}
        for number, cohort in enumerate(self.cohorts):
            moves, turns = [], []
            for node in cohort:
                y = self.train(number, node, x, shift=c - own[node])
                new = own[node] - c + (x - y) / (self.steps(node) * rate)
                moves.append(y - x)
                turns.append(new - own[node])
                own[node] = new
            x = x + server_rate * np.mean(moves, axis=0)
            c = c + len(cohort) / clients * np.mean(turns, axis=0)
        return x

    def feddyn(self, alpha):
        x = self.start
        h, own = np.zeros_like(x), {node: np.zeros_like(x) for node in self.e.nodes}
        for number, cohort in enumerate(self.cohorts):
            trained = []
            for node in cohort:
                theta = self.train(number, node, x, shift=-own[node], pull=alpha)
                own[node] = own[node] - alpha * (theta - x)
                trained.append(theta)
            h = h - alpha / self.e.clients * np.sum([theta - x for theta in trained], axis=0)
            x = np.mean(trained, axis=0) - h / alpha
        return x

    def fednova(self, norm):
        x, pull = self.start, self.e.local.proximal
        for number, cohort in enumerate(self.cohorts):
            share = np.array([float(self.site.samples(node)) for node in cohort])
            share /= share.sum()
            norms = [norm(self.steps(node)) for node in cohort]
            d = [(x - self.train(number, node, x, pull=pull)) / a for node, a in zip(cohort, norms, strict=True)]
            x = x - (share @ norms) * (share @ np.stack(d))
        return x


def assert_same(result, twin):
    assert np.abs(result.state.numpy() - twin).max() < 3e-6


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_scaffold_is_that_of_the_paper(engine, participation):
    e = experiment(aggregator=lab.scaffold(server_learning_rate=0.7), participation=participation)
    result = lab.run(e, engine=engine, workers=1)
    assert_same(result, Twin(e, result).scaffold(0.7))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_feddyn_is_that_of_the_paper(engine, participation):
    e = experiment(aggregator=lab.feddyn(alpha=0.3), participation=participation)
    result = lab.run(e, engine=engine, workers=1)
    assert_same(result, Twin(e, result).feddyn(0.3))


NORMS = {  # of a client's gradients in its change: the paper's section 4, in closed form
    "plain": (lab.Local(epochs=2, batch=8, optimizer=lab.sgd(0.2)), lambda steps: steps),
    "momentum": (
        lab.Local(epochs=2, batch=8, optimizer=lab.sgd(0.1, 0.8)),
        lambda steps: (steps - 0.8 * (1 - 0.8**steps) / 0.2) / 0.2,
    ),
    "proximal": (
        lab.Local(epochs=2, batch=8, optimizer=lab.plain_sgd(0.2), proximal=0.5),
        lambda steps: (1 - 0.9**steps) / 0.1,
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NORMS)
def test_fednova_is_that_of_the_paper(engine, name):
    local, norm = NORMS[name]
    e = experiment(aggregator="fednova", local=local)
    twin = Twin(e, result := lab.run(e, engine=engine, workers=1))
    assert len({twin.steps(node) for node in e.nodes}) > 2
    assert_same(result, twin.fednova(norm))


def test_fednova_of_equal_steps_is_fedavg():
    local = lab.Local(iterations=5, batch=8, optimizer=lab.sgd(0.1, 0.9))
    nova, average = (lab.run(experiment(aggregator=a, local=local), engine="sequential") for a in ("fednova", "fedavg"))
    torch.testing.assert_close(nova.state, average.state, rtol=0, atol=1e-6)


# -- what they are for ------------------------------------------------------------------------------------------------


class Quadratic(nn.Module):
    """Logits whose cross-entropy for the label 0 is k/2·(w − b)² + 0.1, of samples (b, k)."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        loss = x[:, 1] / 2 * (self.w - x[:, 0]) ** 2 + 0.1
        return torch.stack([-torch.log(torch.expm1(loss)), torch.zeros_like(loss)], 1)


def quadratics(centres, curvatures, samples, **changes):
    """One client for each quadratic, with so many copies of its sample."""
    x = torch.tensor([*zip(centres, curvatures, strict=True)]).repeat_interleave(torch.tensor(samples), 0)
    groups = torch.arange(len(samples)).repeat_interleave(torch.tensor(samples))
    y = torch.zeros(len(x), dtype=torch.int64)
    return lab.Experiment(
        dataset=lab.Arrays(x, y, x, y, groups=groups, classes=2),
        partition="natural",
        model=lab.Own(Quadratic, stackable=True),
        clients=len(samples),
        test_share=0.0,
        evaluation=lab.Evaluation(every=1000),
        **changes,
    )


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_unequal_quadratics_are_solved_where_fedavg_is_biased(engine):
    """The optimum is Σ kᵢ·bᵢ / Σ kᵢ; long local training leads each client to its own bᵢ, and FedAvg to their mean."""
    optimum = (0.0 * 1 + 1.0 * 4) / 5

    def reached(aggregator):
        local = lab.Local(iterations=10, batch=4, optimizer=lab.sgd(0.1))
        e = quadratics([0.0, 1.0], [1.0, 4.0], [4, 4], aggregator=aggregator, local=local, rounds=40)
        return float(lab.run(e, engine=engine, workers=1).state)

    assert abs(reached("fedavg") - optimum) > 0.1
    assert abs(reached("scaffold") - optimum) < 1e-5
    assert abs(reached(lab.feddyn(alpha=1.0)) - optimum) < 1e-5


def test_fednova_weighs_by_samples_and_not_by_steps():
    """Clients of 4 and 16 samples take 1 and 4 steps: FedAvg counts the second four times too much."""
    local = lab.Local(epochs=1, batch=4, optimizer=lab.sgd(0.02))

    def reached(aggregator):
        e = quadratics([0.0, 1.0], [1.0, 1.0], [4, 16], aggregator=aggregator, local=local, rounds=120)
        return float(lab.run(e, engine="sequential").state)

    assert reached("fedavg") == pytest.approx(16 / 17, abs=0.02)
    assert reached("fednova") == pytest.approx(16 / 20, abs=0.02)


# -- the lab's promises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["reuse", "stacked"])
@pytest.mark.parametrize("aggregator", ["scaffold", "feddyn", "fednova"])
def test_workers_watching_and_resuming_change_no_bit(engine, aggregator, tmp_path, monkeypatch):
    monkeypatch.setattr("fedvitals.lab.stacked.executor.STACK", 2)
    e = experiment(aggregator=aggregator, participation=0.75)
    plain = lab.run(e, engine=engine, workers=1)
    with Monitor(None, sinks=[MemorySink()], strict=True) as monitor:
        watched = lab.run(e, monitor, engine=engine, workers=2)
    for number, _ in enumerate(lab.rounds(e, engine=engine, workers=2, checkpoint=tmp_path)):
        if number == 1:
            break
    resumed = lab.run(e, engine=engine, workers=1, checkpoint=tmp_path, resume=True)
    assert torch.equal(plain.state, watched.state)
    assert torch.equal(plain.state, resumed.state)


def test_who_fails_or_lies_leaves_the_servers_vector_to_the_others():
    """A client that crashes keeps what it remembered; one whose update cannot be used is not heard."""
    faults = [lab.crash(nodes=["c0"]), lab.shape_mismatch(nodes=["c1"])]
    e = experiment(aggregator="scaffold", faults=faults, rounds=2)
    states = {}

    class Keeper(lab.Centralized, frozen=True):
        def round(self, federation):
            after = super().round(federation)
            states.update(federation.server.memory)
            return after

    lab.run(lab.Experiment(**{f: getattr(e, f) for f in e.__struct_fields__} | {"topology": Keeper()}), workers=1)
    assert set(states) == {"drift/c1", "drift/c2", "drift/c3", "drift/server"}
    mean = (states["drift/c2"].double() + states["drift/c3"]) / e.clients
    torch.testing.assert_close(states["drift/server"], mean, rtol=0, atol=1e-9)


def transfers(sink):
    return [t for t in sink.records if type(t).__name__ == "Transfer" and t.kind in ("model", "update")]


def test_scaffold_sends_twice_as_much():
    def transferred(aggregator, **changes):
        sink = MemorySink()
        with Monitor(None, sinks=[sink], strict=True) as monitor:
            lab.run(experiment(aggregator=aggregator, rounds=1, **changes), monitor, engine="sequential")
        return {kind: {t.bytes for t in transfers(sink) if t.kind == kind} for kind in ("model", "update")}

    model = 4 * (FEATURES * CLASSES + CLASSES)
    assert transferred("fedavg") == {"model": {model}, "update": {model}}
    assert transferred("feddyn") == {"model": {model}, "update": {model}}
    assert transferred("scaffold") == {"model": {2 * model}, "update": {2 * model}}
    (encoded,) = transferred("fedavg", compression="fp16")["update"]
    assert transferred("scaffold", compression="fp16") == {"model": {2 * model}, "update": {encoded + model}}


def test_a_network_takes_the_time_of_what_scaffold_sends():
    def seconds(aggregator):
        network = lab.Network(links="3g", devices="phone")
        sink = MemorySink()
        with Monitor(None, sinks=[sink], strict=True) as monitor:
            e = experiment(aggregator=aggregator, rounds=1, network=network, model=lab.mlp(hidden=(256,)))
            lab.run(e, monitor, engine="sequential")
        return [t.seconds for t in transfers(sink)]

    assert min(a - b for a, b in zip(seconds("scaffold"), seconds("fedavg"), strict=True)) > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aggregator": "scaffold", "local": lab.Local(optimizer=lab.adam())}, "plain SGD"),
        ({"aggregator": "scaffold", "local": lab.Local(optimizer=lab.sgd(0.1, 0.9))}, "plain SGD"),
        ({"aggregator": "scaffold", "local": lab.Local(proximal=0.1)}, "proximal"),
        ({"aggregator": "feddyn", "local": lab.Local(proximal=0.1)}, "proximal"),
        ({"aggregator": "scaffold", "topology": lab.Hierarchical(edges=2)}, "centralized"),
        ({"aggregator": "feddyn", "topology": lab.Rings(2)}, "centralized"),
        ({"aggregator": "fednova", "topology": lab.Rings(2)}, "centralized"),
        ({"aggregator": "fednova", "local": lab.Local(optimizer=lab.adam())}, "known sum"),
        ({"aggregator": "fednova", "local": lab.Local(optimizer=lab.sgd(0.5), proximal=2.0)}, "below one over"),
        ({"aggregator": {"kind": "feddyn", "alpha": 0}}, "above 0"),
        ({"aggregator": {"kind": "scaffold", "server_learning_rate": -1}}, "above 0"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        experiment(**changes)


def test_a_rule_that_clients_train_with_is_not_replaced_by_a_correction():
    action = Action(Where("r"), 0.0, "TEST", "robust_aggregator", None, {"rule": "median"})
    with pytest.raises(ConfigError, match="cannot be replaced"):
        robust_aggregator(ActiveCorrections(), action, experiment(aggregator="scaffold"))
