# SPDX-License-Identifier: Apache-2.0
"""Settings of local training: schedules against PyTorch's, accumulation against one large batch, and plain SGD."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.optim import lr_scheduler

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.corrections import ActiveCorrections, client_rate
from fedvitals.lab.engines.site import Site
from fedvitals.lab.faults import table as fault_table
from fedvitals.lab.federation import ServerState
from fedvitals.lab.stacked.executor import stacking_obstacle
from fedvitals.monitor.monitor import Monitor
from fedvitals.protocols import NullObserver
from fedvitals.records import Action, Where
from fedvitals.testing import MemorySink

RATE = 0.4


def experiment(**changes):
    settings = {"dataset": lab.synthetic(samples=120), "model": "mlp", "clients": 3, "rounds": 2, "seed": 3}
    return lab.Experiment(**{**settings, **changes})


def warmed_up(optimizer, rounds, schedule):
    linear = lr_scheduler.LinearLR(optimizer, 1 / (rounds + 1), 1.0, rounds)
    return lr_scheduler.SequentialLR(optimizer, [linear, schedule], [rounds])


SCHEDULES = {
    "warmup": (lab.warmup(4), lambda o: lr_scheduler.LinearLR(o, 1 / 5, 1.0, 4)),
    "cosine": (lab.cosine(20, floor=0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 20, 0.1 * RATE)),
    "cosine after a warm-up": (
        lab.cosine(17, floor=0.1, warmup=3),
        lambda o: warmed_up(o, 3, lr_scheduler.CosineAnnealingLR(o, 17, 0.1 * RATE)),
    ),
    "steps": (lab.steps(5, gamma=0.5), lambda o: lr_scheduler.StepLR(o, 5, 0.5)),
    "steps after a warm-up": (
        lab.steps(5, gamma=0.5, warmup=2),
        lambda o: warmed_up(o, 2, lr_scheduler.StepLR(o, 5, 0.5)),
    ),
    "restarts": (
        lab.restarts(4, growth=2, floor=0.1),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2, 0.1 * RATE),
    ),
    "equal restarts": (lab.restarts(6), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 6, 1, 0.01 * RATE)),
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning", "ignore:.*epoch parameter:UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_pytorch(name):
    schedule, make = SCHEDULES[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], RATE)
    scheduler, expected = make(optimizer), []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    local = lab.Local(optimizer=lab.sgd(RATE), schedule=schedule)
    assert [local.at(r).optimizer.learning_rate for r in range(20)] == pytest.approx(expected, rel=1e-9)


def test_a_cosine_stays_at_its_floor():
    assert lab.cosine(5, floor=0.2).factor(50) == pytest.approx(0.2)


@pytest.mark.parametrize("engine", ["sequential", "reuse", "stacked"])
def test_a_round_is_trained_at_its_rate(engine):
    """The second round of a schedule that halves, from the model of the first, is one at half the rate."""
    halved = lab.Local(iterations=3, optimizer=lab.sgd(0.2), schedule=lab.steps(1, gamma=0.5))
    first, second = (r.state.clone() for r in lab.rounds(experiment(local=halved), engine=engine, workers=1))
    constant = experiment(local=lab.Local(iterations=3, optimizer=lab.sgd(0.1)))
    again = lab.run(constant, engine=engine, workers=1, start=(1, ServerState(first))).state
    assert torch.equal(second, again)


def test_corrections_and_faults_multiply_what_the_schedule_gives():
    local = lab.Local(optimizer=lab.sgd(0.2), schedule=lab.steps(2, gamma=0.5))
    e = experiment(local=local, faults=[lab.wrong_learning_rate(nodes=["c1"], factor=10.0)])
    corrections = ActiveCorrections()
    client_rate(corrections, Action(Where("r"), 0.0, "T", "client_rate", None, {"factor": 0.1}), e)
    assert corrections.local.at(2).optimizer.learning_rate == pytest.approx(0.2 * 0.1 * 0.5)
    rates = [
        fault_table.apply_local(e.faults, 2, node, corrections.local).optimizer.learning_rate for node in ("c0", "c1")
    ]
    assert rates == pytest.approx([0.01, 0.1])


@pytest.mark.parametrize("engine", ["sequential", "reuse", "stacked"])
@pytest.mark.parametrize("length", [{"iterations": 3}, {"epochs": 2}])
def test_accumulated_batches_are_one_large_batch(engine, length):
    small, large = (
        lab.run(experiment(local=lab.Local(**length, batch=b, accumulate=n), partition=lab.quantity_skew()),
                engine=engine, workers=1)
        for b, n in ((4, 3), (12, 1))
    )  # fmt: skip
    torch.testing.assert_close(small.state, large.state, rtol=0, atol=1e-6)
    assert {n: len(v) for n, v in small.rounds[0].losses.items()} == {
        n: len(v) for n, v in large.rounds[0].losses.items()
    }
    for node, losses in small.rounds[1].losses.items():
        torch.testing.assert_close(losses, large.rounds[1].losses[node], rtol=1e-5, atol=1e-6)


def test_batch_norm_sees_each_mini_batch_by_itself():
    states = [
        lab.run(experiment(dataset="digits", model=lab.resnet18(norm="batch"), clients=1, rounds=1,
                           local=lab.Local(iterations=1, batch=b, accumulate=n)), engine="sequential").state
        for b, n in ((2, 4), (8, 1))
    ]  # fmt: skip
    assert (states[0] - states[1]).abs().max() > 1e-3


class Beginnings(NullObserver):
    def __init__(self):
        self.optimizers = []

    def client_begin(self, node, model=None, optimizer=None, *_, **__):
        self.optimizers.append(optimizer)


def test_plain_sgd_is_sgd_without_an_object():
    seen = [Beginnings(), Beginnings()]
    plain, usual = (
        lab.run(experiment(local=lab.Local(iterations=4, optimizer=optimizer)), observer, engine="sequential").state
        for optimizer, observer in zip((lab.plain_sgd(0.1), lab.sgd(0.1)), seen, strict=True)
    )
    assert torch.equal(plain, usual)
    assert seen[0].optimizers == [None] * 6
    assert all(isinstance(optimizer, torch.optim.SGD) for optimizer in seen[1].optimizers)


@pytest.mark.parametrize("engine", ["sequential", "reuse", "stacked"])
def test_plain_sgd_is_watched(engine):
    """What needs no optimiser is told: updates, weights, losses. A monitor changes no bit of it."""
    e, sink = experiment(local=lab.Local(iterations=4, optimizer=lab.plain_sgd(0.1))), MemorySink()
    with Monitor(None, sinks=[sink], strict=True) as monitor:
        watched = lab.run(e, monitor, engine=engine, workers=2)
    assert torch.equal(watched.state, lab.run(e, engine=engine, workers=1).state)
    names = {r.name for r in sink.records if type(r).__name__ == "Metric" and r.where.node == "c1"}
    assert {"update.norm", "update.cosine_mean"} <= names


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_weight_decay_is_a_gradient_of_half_the_squared_weights(kind):
    """A client's first steps against PyTorch's by hand, on the same batches."""
    optimizer = lab.sgd(0.1, 0.9, weight_decay=0.2) if kind == "sgd" else lab.adam(0.01, weight_decay=0.2)
    e = experiment(clients=1, rounds=1, local=lab.Local(iterations=3, optimizer=optimizer))
    site = Site.of(e)
    (x, y), order = site.tensors("c0", 0), site.order("c0", 0, 3, 16, site.samples("c0"))
    module = site.module
    without = (
        torch.optim.SGD(module.parameters(), 0.1, 0.9)
        if kind == "sgd"
        else torch.optim.Adam(module.parameters(), 0.01, eps=1e-7)
    )
    for rows in order:
        without.zero_grad()
        squares = sum((p**2).sum() for p in module.parameters())
        (F.cross_entropy(module(x[rows]), y[rows]) + 0.1 * squares).backward()
        without.step()
    for engine in ("sequential", "reuse", "stacked"):
        state = lab.run(e, engine=engine, workers=1).state
        torch.testing.assert_close(state, site.layout.flat(module), rtol=0, atol=1e-5)


def test_bfloat16_is_autocast():
    """The sequential engine to the last bit against a loop by hand; the others near float32, and not it."""
    half = lab.Local(iterations=3, precision="bfloat16", optimizer=lab.sgd(0.1))
    e = experiment(clients=1, rounds=1, local=half)
    site = Site.of(e)
    (x, y), order = site.tensors("c0", 0), site.order("c0", 0, 3, 16, site.samples("c0"))
    optimizer = torch.optim.SGD(site.module.parameters(), 0.1)
    for rows in order:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = site.module(x[rows])
        assert outputs.dtype == torch.bfloat16
        F.cross_entropy(outputs.float(), y[rows]).backward()
        optimizer.step()
    assert torch.equal(lab.run(e, engine="sequential").state, site.layout.flat(site.module))
    whole = lab.run(experiment(clients=1, rounds=1, local=lab.Local(iterations=3, optimizer=lab.sgd(0.1)))).state
    for engine in ("sequential", "reuse", "stacked"):
        difference = (lab.run(e, engine=engine, workers=1).state - whole).abs().max()
        assert 1e-6 < difference < 2e-2, engine


def test_settings_survive_toml():
    text = """
[local]
iterations = 3
accumulate = 4
precision = "bfloat16"
optimizer = {kind = "plain_sgd", learning_rate = 0.2}
schedule = {kind = "restarts", rounds = 4, growth = 2, warmup = 2}
"""
    e = lab.read(text)
    assert e.local == lab.Local(
        iterations=3, accumulate=4, precision="bfloat16", optimizer=lab.plain_sgd(0.2),
        schedule=lab.restarts(4, growth=2, warmup=2),
    )  # fmt: skip
    assert lab.read(e.to_toml()) == e
    assert lab.read('[local]\nschedule = "warmup"').local.schedule == lab.warmup(5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("accumulate = 0", "at least 1"),
        ('precision = "fp16"', "float32"),
        ('schedule = "cosin"', "Did you mean 'cosine'"),
        ('schedule = {kind = "cosine"}', "rounds"),
        ('schedule = {kind = "cosine", rounds = 0}', "at least 1"),
        ('schedule = {kind = "cosine", rounds = 3, floor = 0}', "above 0"),
        ('schedule = {kind = "steps", every = 2, gama = 1}', "Did you mean 'gamma'"),
        ('schedule = {kind = "restarts", rounds = 2, growth = 0}', "at least 1"),
        ('schedule = {kind = "steps", every = 2, warmup = -1}', "0 or more"),
        ('optimizer = {kind = "sgd", weight_decay = -1}', "0 or more"),
        ('optimizer = {kind = "plain_sgd", momentum = 0.9}', "momentum"),
    ],
)
def test_impossible_settings_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        lab.read(f"[local]\n{text}")


def test_mini_batches_that_weigh_differently_are_not_stacked():
    """The mean of weighted means is not that of one large batch."""
    local, weighted = lab.Local(iterations=1, batch=4, accumulate=2), lab.cross_entropy(class_weights="balanced")
    tokens = {"dataset": lab.text(packages=3, package_bytes=4000), "model": lab.gpt(width=8, layers=1)}
    for fields in ({}, {"loss": weighted}, tokens):
        assert stacking_obstacle(Site.of(experiment(**fields))) is None
    assert stacking_obstacle(Site.of(experiment(local=local))) is None
    for fields in ({"loss": weighted}, tokens):
        assert "Accumulated batches" in stacking_obstacle(Site.of(experiment(**fields, local=local)))
