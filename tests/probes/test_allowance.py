# SPDX-License-Identifier: Apache-2.0
"""Budgets that count work: who is measured depends on names, rounds and counts, not on clocks, threads or processes."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fedvitals as fv
from fedvitals import lab
from fedvitals.lab.demo import DemoSettings, federate
from fedvitals.probes.allowance import (
    FIRST_SAMPLES,
    FLOOR_ROUNDS,
    TRAINING,
    Allowance,
    Turn,
    Turns,
    one_step_in,
    training_work,
)
from fedvitals.probes.fit import FEWEST, MOST, Fit, fit_work
from fedvitals.probes.presets import FIT_ROUNDS, SCALE_ROUNDS, Planned, Preset, preset
from fedvitals.probes.scale import IMAGES, scale
from fedvitals.probes.weights import weights
from fedvitals.protocols import Moment
from fedvitals.store import open_reader
from fedvitals.views.card import health_card, how_often
from support.models import make, make_data, train, watched

# What a machine is like, and not what was measured of the training.
MACHINE = ("time.", "memory.", "monitor.", "throughput.", "bottleneck.", "machine.", "process.", "gpu.")
NAMES = st.one_of(st.integers(0, 10**6).map("c{}".format), st.text(min_size=1, max_size=12))
COSTS = st.floats(1, 1e4)


def stored(sink):
    """The set of what was stored: (round, node, name) of each metric that is not about the machine."""
    metrics = [m for m in sink.metrics() if not m.name.startswith(MACHINE)]
    return {(m.where.round, m.where.node, m.where.step, m.name) for m in metrics}


# -- the rule ---------------------------------------------------------------------------------------------------------


@given(st.sampled_from([1, 4, 8, 20]), COSTS, st.floats(0, 1e7), st.floats(0.01, 100), NAMES, st.integers(0, 1000))
def test_share_floor_and_ceiling(floor_rounds, cost, work, percent, node, first):
    """In each block of rounds a client is measured at least once, and no oftener than its share pays for."""
    allowance = Allowance(percent, floor_rounds)
    period = allowance.period(cost, work)
    block = range(first * floor_rounds, (first + 1) * floor_rounds)
    times = sum(allowance.due(node, Turn(number), cost, work) for number in block)
    assert times == floor_rounds // period >= 1
    assert period == floor_rounds or cost / period <= allowance.earned(work)


def test_without_a_budget_always_and_with_none_never():
    for number in range(20):
        assert Allowance(None).due("c1", Turn(number), 1e9, 0)
        assert not Allowance(0.0).due("c1", Turn(number, stand_ins=((FLOOR_ROUNDS, "c1"),)), 1, 1e9)


@given(st.lists(NAMES, min_size=1, max_size=12, unique=True), st.integers(0, 10**6), st.data())
def test_some_client_in_each_round(nodes, number, data):
    """Whatever they are called, in whatever order, and however few they are."""
    turns = Turns(preset("standard"))
    turns.begin(number)
    turn = turns.hand_out(data.draw(st.permutations(nodes)))
    for floor_rounds in (FIT_ROUNDS, SCALE_ROUNDS):
        due = [node for node in nodes if Allowance(0.001, floor_rounds).due(node, turn, 1e9, 1)]
        assert due or len(nodes) == 1  # which may be one of several that are handed out one by one
    assert turns.hand_out(nodes[1:]) == turn  # who is still expected depends on who was quickest


@given(st.permutations([(f"c{i}", 10 + i) for i in range(7)]))
def test_the_order_in_which_clients_end_means_nothing(ended):
    turns = Turns(preset("standard"))
    turns.begin(0)
    for node, steps in ended:
        turns.note(node, steps)
    turns.begin(1)
    assert turns.now == Turn(1, 13, ())
    turns.begin(7)  # after a round of which nothing is known
    assert turns.now.steps == 13


def test_clients_of_a_round_before_stand_in():
    """In a plain loop nobody tells who takes part: those of the round before are expected again."""
    turns = Turns(preset("standard"))
    alone = Allowance(0.001, SCALE_ROUNDS)
    measured = []
    for number in range(16):
        turns.begin(number)
        measured += [(number, node) for node in ("a", "b") if alone.due(node, turns.of(node, number), 1e9, 1)]
        for node in ("b", "a"):
            turns.note(node, 4)
    assert {number for number, _ in measured} == {*range(16)}
    assert {node for _, node in measured} == {"a", "b"}


def test_hostile_numbers_of_steps_are_not_noted():
    turns = Turns(preset("standard"))
    for steps in (float("nan"), float("inf"), -1.0):
        turns.note("c0", steps)
    turns.begin(0)
    turns.begin(1)
    assert turns.now == Turn(1)


@pytest.mark.parametrize("every", [2, 4, 8])
def test_who_takes_part_every_few_rounds_is_measured(every):
    """The place of a client's round moves from block to block: no rhythm always misses it."""
    for phase, node in itertools.product(range(every), ("c0", "c5", "hospital")):
        rounds = range(phase, 64 * every, every)
        times = sum(Allowance(0.001).due(node, Turn(number), 1e9, 1) for number in rounds)
        assert len(rounds) / 16 <= times <= len(rounds) / 4


def test_numbered_clients_take_turns_evenly():
    for number in range(40):
        due = sum(Allowance(0.001).due(f"client-{i:03}", Turn(number), 1e9, 1) for i in range(8 * 5))
        assert due == 5


def test_rounds_without_numbers_are_counted_where_they_run():
    turns = Turns(preset("standard"))
    assert [turns.of("c0", None).round_index for _ in range(3)] == [0, 1, 2]
    assert turns.of("c1", None).round_index == 0
    turns.now = Turn(5, 10)  # a worker of a host that does not tell its clients the round, only whose turn it is
    assert turns.of("c0", None) == Turn(5, 10)
    assert turns.of("c0", 9) == Turn(9, 10)


def test_work_of_training():
    assert training_work(100, 20, 8) == TRAINING * 160
    assert training_work(100, 20, None) == TRAINING * 320
    assert training_work(5, 20, None) == TRAINING * 100
    assert training_work(100, None, 8) == TRAINING * 100
    assert training_work(10**9, None, 8) == TRAINING * FIRST_SAMPLES


@given(st.integers(1, 10**7), st.integers(1, 10**6))
def test_number_of_samples_of_fit(samples, steps):
    """A power of two from 8 to 64, the largest that the share pays for; the fewest where it pays for none."""
    fit = Fit(0.7)
    counts = {fit.count("c3", Turn(number, steps), samples) for number in range(FLOOR_ROUNDS)}
    (count,) = counts - {0}
    earned = 0.007 * training_work(samples, steps, None)
    assert count in (FEWEST, 16, 32, MOST)
    assert count == FEWEST or fit_work(count) <= earned
    assert count == MOST or fit_work(2 * count) > earned
    assert (0 in counts) == (fit_work(count) > earned)
    assert Fit(0.7, most=4).count("c3", Turn(0, 10**9), 10**9) in (0, 4)


def test_scale_has_a_ceiling():
    (planned,) = [planned for planned in preset("standard").probes if isinstance(planned.probe, scale)]
    assert planned.probe.images == IMAGES == 16
    assert planned.work(10) == planned.work(10**6) == scale().work(0)
    assert scale(images="all").work(100) > scale(images=99).work(0)
    assert scale(exact=True).work(16) > scale().work(16)
    assert Planned(weights).work(7) == Planned(weights).work(10**6)


def test_one_step_in_many():
    """Other steps for each client and in each round; on average as many as it says, also of short rounds."""
    steps = [
        (node, number, step)
        for node in ("c0", "c1", "x")
        for number in range(100)
        for step in range(10)
        if one_step_in(25, Moment(number, node, step, 0.0, 0.0))
    ]
    assert len(steps) == 3 * 100 * 10 / 25
    assert len({step for _, _, step in steps}) == 10


# -- in a loop --------------------------------------------------------------------------------------------------------


def loop(probes="standard", *, wait=lambda step: None, threads=1, rounds=5, clients=5, data=make_data):
    """What is stored of a plain loop, each round's clients on so many threads."""
    monitor, sink = watched(probes, machine=False)

    def client(name, model, own):
        with monitor.client(name, model, data=data(), loss=functional.cross_entropy):
            train(model, torch.optim.SGD(model.parameters(), 0.1), own, 3, wait)

    with monitor:
        for number in range(rounds):
            with monitor.round(number), ThreadPoolExecutor(threads) as pool:
                tasks = [(f"c{i}", make("mlp"), make_data(seed=i)) for i in range(clients)]
                for future in [pool.submit(client, *task) for task in tasks]:
                    future.result()
    return sink


@pytest.mark.parametrize("probes", ["light", "standard", "deep"])
def test_a_slow_machine_stores_the_same(probes):
    quick = loop(probes)
    slow = loop(probes, wait=lambda step: time.sleep(0.004 if step % 2 else 0.0))
    assert stored(slow) == stored(quick)
    assert slow.metrics("fit.samples")


@pytest.mark.thorough
def test_a_busy_machine_stores_the_same():
    """Beside threads that take all the time they get, and with clients that end in any order."""
    twin, done = loop(), threading.Event()

    def busy():
        while not done.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert stored(loop()) == stored(twin)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    # Inside of a pool's threads, clients of a round end in another order each time.
    stream = np.random.default_rng(0)
    assert stored(loop(threads=3, wait=lambda _: time.sleep(stream.uniform(0, 0.003)))) == stored(twin)


def test_gradient_scale_in_every_round_and_every_client_in_a_few():
    sink = loop(rounds=16, clients=4)
    measured = {(m.where.round, m.where.node) for m in sink.metrics("scale.images")}
    assert {number for number, _ in measured} == {*range(16)}
    for first in range(0, 16, SCALE_ROUNDS):
        block = {node for number, node in measured if first <= number < first + SCALE_ROUNDS}
        assert block == {"c0", "c1", "c2", "c3"}
    assert all(m.value <= IMAGES for m in sink.metrics("scale.images"))
    fitted = {(m.where.round, m.where.node) for m in sink.metrics("fit.samples")}
    assert {number for number, _ in fitted} >= {*range(1, 16)}
    assert len(fitted) < 4 * 16


@pytest.mark.parametrize("clients", [1, 2, 5])
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_gradient_scale_in_every_round_of_small_federations(engine, clients):
    """Also of the paper's CNN with so little training that its budget alone would allow one measurement in four."""
    e = lab.Experiment(model=lab.paper_cnn(), clients=clients, rounds=6, local=lab.Local(iterations=2, batch=8))
    measured = {(m.where.round, m.where.node) for m in lab_sink(e, engine, None).metrics("scale.gsc")}
    assert {number for number, _ in measured} == {*range(6)}
    assert {node for number, node in measured if number == 0} == {*e.nodes}


def test_gradient_scale_in_every_round_of_the_demo():
    monitor, sink = watched("standard", machine=False)
    with monitor:
        rounds = [*federate(DemoSettings(clients=8, rounds=4, local_epochs=1), monitor)]
    assert {m.where.round for m in sink.metrics("scale.gsc")} == {*range(len(rounds))}


def test_long_training_is_measured_oftener_with_more_samples():
    """From the second round on, when the number of steps is known."""

    def data():
        x, y = make_data(4000)
        return DataLoader(TensorDataset(x, y), batch_size=4000)

    sink = loop(rounds=3, clients=2, data=data)
    counts = {(m.where.round, m.where.node): m.value for m in sink.metrics("fit.samples")}
    assert all(counts[number, node] == MOST for number in (1, 2) for node in ("c0", "c1"))
    assert len(sink.metrics("scale.images")) == 6


def test_a_client_without_data_pays_with_its_batches():
    monitor, sink = watched(machine=False)
    with monitor:
        for number in range(4):
            with monitor.round(number), monitor.client("c0", model := make("mlp")):
                train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 3)
    assert len(sink.metrics("scale.from_batch")) == 4


def test_how_often_is_shown(tmp_path):
    """In how many client-rounds each probe that takes turns measured."""
    path = tmp_path / "runs.db"
    with fv.Monitor(path, run="often", strict=True, machine=False) as monitor:
        for number in range(5):
            with monitor.round(number):
                for name in ("c0", "c1", "c2"):
                    model = make("mlp")
                    with monitor.client(name, model, data=make_data(), loss=functional.cross_entropy):
                        train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 2)
        run = monitor.run.id
    with open_reader(path) as reader:
        card = health_card(reader, run)
    assert card.client_rounds == 15
    assert 5 <= card.measured["gradient scale"] < 15
    assert 1 <= card.measured["fit"] < 15
    assert f"gradient scale in {card.measured['gradient scale']}" in how_often(card)
    assert "nonlinearity" not in card.measured


# -- in the lab -------------------------------------------------------------------------------------------------------


def experiment(**changes):
    small = {
        "dataset": lab.synthetic(samples=1500),  # of a client with fewer than are asked for, a stack uses some twice
        "model": "mlp",
        "clients": 7,
        "rounds": 6,
        "local": lab.Local(epochs=1, batch=8),
        "partition": lab.quantity_skew(),
        "seed": 3,
    }
    return lab.Experiment(**{**small, **changes})


def lab_sink(e, engine, workers, probes="standard"):
    monitor, sink = watched(probes, machine=False)
    with monitor:
        lab.run(e, monitor, engine=engine, workers=workers)
    return sink


def test_stacked_clients_are_those_that_would_be_measured_alone():
    """With so large a share that clients of unequal size have periods and numbers of samples of their own."""
    probes = Preset("dear", (Planned(scale(images=4), percent=20.0),), fit_percent=10.0)
    for e in (experiment(), experiment(participation=0.5, rounds=9)):
        twin, sink = (lab_sink(e, engine, 1, probes) for engine in ("sequential", "stacked"))
        assert stored(sink) == stored(twin)
        for name in ("fit.samples", "scale.images"):
            counts, wanted = ({(m.where.round, m.where.node): m.value for m in s.metrics(name)} for s in (sink, twin))
            assert counts == wanted
            assert {number for number, _ in counts} == {*range(e.rounds)}
        for name in ("fit.loss_before", "fit.loss_after", "fit.confusion", "scale.gsc"):
            values, wanted = ({(m.where.round, m.where.node): m.value for m in s.metrics(name)} for s in (sink, twin))
            np.testing.assert_allclose([values[key] for key in wanted], [*wanted.values()], rtol=1e-3, atol=1e-5)
        assert len({m.value for m in twin.metrics("fit.samples")}) > 1


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["reuse", "stacked"])
@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_the_number_of_processes_does_not_matter(engine, participation):
    e = experiment(participation=participation, clients=9, local=lab.Local(iterations=3, batch=8))
    twin = stored(lab_sink(e, "sequential", 1))
    assert {number for number, _, _, name in twin if name == "scale.gsc"} == {*range(e.rounds)}
    assert {number for number, _, _, name in twin if name == "fit.loss_before"} == {*range(e.rounds)}
    for workers in (0, 1, 2):
        assert stored(lab_sink(e, engine, workers)) == twin


@pytest.mark.parametrize("topology", ["hierarchical", "rings", "clustered"])
def test_other_topologies_store_the_same_twice(topology):
    e = experiment(topology=topology, rounds=3, faults=[lab.crash(nodes=["c2"], at_step=1)])
    assert stored(lab_sink(e, "sequential", 1)) == stored(lab_sink(e, "sequential", 1))


def test_probe_of_every_few_rounds_of_a_stack():
    """A budget on top of `rounds`, of a probe that measures the whole stack at once: only who is due is told."""
    probes = Preset("own", (Planned(weights, percent=1e-6, rounds=2),), fit_percent=0)
    twin, sink = (lab_sink(experiment(), engine, 1, probes) for engine in ("sequential", "stacked"))
    assert stored(sink) == stored(twin)
    assert sink.metrics("weight.norm", node="c0") or sink.metrics("weight.norm", node="c1")
    assert not sink.metrics("fit.samples")
    assert replace(probes, fit_percent=None).fit_floor_rounds == FLOOR_ROUNDS
