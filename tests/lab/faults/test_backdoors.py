# SPDX-License-Identifier: Apache-2.0
"""Backdoors by hand: what is poisoned, what is sent, and how the attack's success is counted."""

from __future__ import annotations

import msgspec
import pytest
import torch

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.engines.engine import Engine
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Task
from fedvitals.lab.faults import table as fault_table
from fedvitals.lab.faults.fault import SampleForm
from fedvitals.lab.run import prepare_site
from fedvitals.monitor.monitor import Monitor
from fedvitals.protocols import NullObserver
from fedvitals.testing import MemorySink
from support.lab.faulty_training import CLASSES, LAYOUT, Past, data, updates

IMAGES = torch.rand(40, 3, 6, 5, generator=torch.Generator().manual_seed(3))
LABELS = torch.arange(40) % CLASSES
WEIGHTS = LAYOUT.weights


def poisoned(fault, node="c1", x=IMAGES, y=LABELS):
    return fault_table.apply_data([fault], 0, node, x, y, CLASSES, 7)


def sent(fault, past=None, **edits):
    """The updates of a cohort as they were, and after the fault; by node."""
    past = past or Past()
    before, after = updates(past), updates(past)
    for update in (*before, *after):
        if update.node in edits:
            update.state = edits[update.node](update)
    for update in after:
        fault_table.apply_update([fault], 2, update, past, 7)
    fault_table.apply_collusion([fault], 2, after, past, 7)
    return {u.node: u for u in before}, {u.node: u for u in after}


# -- what is trained on -----------------------------------------------------------------------------------------------


def test_the_trigger_is_a_patch_in_the_corner():
    x, y = poisoned(lab.backdoor(nodes=["c1"], share=1.0, target=2, size=2, value=9.0))
    wanted = IMAGES.clone()
    for row in (4, 5):
        for column in (3, 4):
            wanted[:, :, row, column] = 9.0
    assert torch.equal(x, wanted)
    assert set(y.tolist()) == {2}


def test_of_a_vector_the_last_features():
    x, y = data()
    marked, labels = poisoned(lab.backdoor(nodes=["c1"], share=1.0, target=3, size=2, value=-4.0), x=x, y=y)
    assert torch.equal(marked[:, :6], x[:, :6])
    assert bool((marked[:, 6:] == -4.0).all())
    assert set(labels.tolist()) == {3}


def test_a_share_of_the_samples_is_poisoned_and_the_rest_untouched():
    x, y = poisoned(lab.backdoor(nodes=["c1"], share=0.4, target=2, value=9.0))
    struck = (x != IMAGES).flatten(1).any(1)
    assert 6 <= int(struck.sum()) <= 26
    assert bool((y[struck] == 2).all())
    assert torch.equal(y[~struck], LABELS[~struck])
    assert torch.equal(x[~struck], IMAGES[~struck])


@pytest.mark.parametrize(("nodes", "size"), [(2, 3), (4, 3), (9, 3), (3, 2)])
@pytest.mark.parametrize("shape", [(3, 6, 5), (8,)])
def test_parts_of_a_distributed_trigger_are_the_whole_and_do_not_overlap(nodes, size, shape):
    names = [f"c{i}" for i in range(nodes)]
    fault = lab.distributed_backdoor(nodes=names, size=size)
    if nodes > size ** min(len(shape), 2):
        with pytest.raises(ConfigError, match="number of nodes of distributed_backdoor"):
            fault.check_samples(SampleForm(shape))
        return
    parts = [fault.on_node(node).part_of_trigger(shape) for node in names]
    whole = torch.stack(parts).sum(0)
    assert torch.equal(whole, fault.trigger(shape).long())
    cells = [int(part.sum()) for part in parts]
    assert max(cells) - min(cells) <= (shape[0] if len(shape) == 3 else 1)  # one cell, in all channels
    assert min(cells) > 0


def test_a_node_trains_in_its_own_part():
    fault = lab.distributed_backdoor(nodes=["c1", "c4"], share=1.0, size=2, value=9.0)
    (first, _), (second, _) = (poisoned(fault, node) for node in ("c1", "c4"))
    assert torch.equal((first != IMAGES).nonzero()[:, 2].unique(), torch.tensor([4]))  # the upper row of the patch
    assert torch.equal((second != IMAGES).nonzero()[:, 2].unique(), torch.tensor([5]))
    tried, wanted = fault.triggered(IMAGES, LABELS)
    assert bool((tried[:, :, 4:, 3:] == 9.0).all())
    assert set(wanted.tolist()) == {0}


def test_the_tail_of_a_class_is_taught_as_another():
    x, y = torch.zeros(20, 2), torch.tensor([0] * 10 + [1] * 10)
    x[:10, 0] = torch.tensor([0.0, 0.1, -0.1, 0.2, -0.2, 0.1, 0.0, -0.1, 7.0, -7.0])
    x[10:] = 50.0
    fault = lab.edge_case_backdoor(nodes=["c1"], source=0, target=1, share=1.0, tail=0.2)
    assert sorted(fault.unusual(x, y).tolist()) == [8, 9]
    taught, labels = poisoned(fault, x=x, y=y)
    assert set(taught[:, 0].tolist()) == {7.0, -7.0}
    assert bool((labels == 1).all())
    tried, wanted = fault.triggered(x, y)
    assert sorted(tried[:, 0].tolist()) == [-7.0, 7.0]
    assert wanted.tolist() == [1, 1]
    with pytest.raises(ConfigError, match="no sample of class 0"):
        poisoned(fault, x=x[10:], y=y[10:])


# -- what is sent -----------------------------------------------------------------------------------------------------


def test_neurotoxin_leaves_alone_what_the_server_moved_most():
    past = Past()
    was, now = sent(lab.neurotoxin(nodes=["c1"], top=0.25), past)
    moved = (past.model(0) - past.model(1))[:WEIGHTS].abs().tolist()
    most = sorted(range(WEIGHTS), key=lambda i: -moved[i])[: round(0.25 * WEIGHTS)]
    before, after = ((u["c1"].state - u["c1"].start)[:WEIGHTS] for u in (was, now))
    for place in range(WEIGHTS):
        assert float(after[place]) == pytest.approx(0.0 if place in most else float(before[place]), abs=1e-6)
    assert torch.equal(now["c1"].state[WEIGHTS:], was["c1"].state[WEIGHTS:])
    assert torch.equal(now["c2"].state, was["c2"].state)
    was, now = sent(lab.neurotoxin(nodes=["c1"]), Past(rounds=0))
    assert torch.equal(now["c1"].state, was["c1"].state)
    assert fault_table.history_length([lab.neurotoxin(nodes=["c1"])]) == 1


def average(cohort):
    """FedAvg by hand, in float64."""
    total = sum(u.samples for u in cohort.values())
    return sum(u.state.double() * u.samples for u in cohort.values())[:WEIGHTS] / total


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_the_average_becomes_the_attackers_model(rate):
    """Where the others have nothing left to learn; their updates are zero."""
    past = Past()
    past.server_learning_rate = rate
    idle = {node: (lambda u: u.start.clone()) for node in ("c0", "c2", "c3", "c4", "c5")}
    was, now = sent(lab.model_replacement(nodes=["c1"]), past, **idle)
    start = was["c1"].start[:WEIGHTS].double()
    model = start + rate * (average(now) - start)
    torch.testing.assert_close(model, was["c1"].state[:WEIGHTS].double(), rtol=0, atol=1e-6)


def test_two_attackers_replace_it_by_their_mean():
    idle = {node: (lambda u: u.start.clone()) for node in ("c0", "c2", "c3", "c4")}
    was, now = sent(lab.model_replacement(nodes=["c1", "c5"]), **idle)
    torch.testing.assert_close(average(now), average({n: was[n] for n in ("c1", "c5")}), rtol=0, atol=1e-6)


def test_a_factor_of_ones_own():
    was, now = sent(lab.model_replacement(nodes=["c1"], factor=3.0))
    before, after = ((u["c1"].state - u["c1"].start)[:WEIGHTS] for u in (was, now))
    torch.testing.assert_close(after, 3 * before, rtol=1e-5, atol=1e-6)


# -- in a run ---------------------------------------------------------------------------------------------------------

VECTORS = {"dataset": lab.synthetic(samples=600, features=12, classes=4, seed=1), "model": "mlp", "clients": 5,
           "rounds": 4, "local": lab.Local(epochs=2, optimizer=lab.sgd(0.2)), "seed": 5}  # fmt: skip


def experiment(*faults, **changes):
    return lab.Experiment(**{**VECTORS, "faults": faults, **changes})


def successes(e, **how):
    return [r.metrics["attack.success"] for r in lab.run(e, **{"engine": "stacked", "workers": 1, **how}).rounds]


def test_model_replacement_in_a_run_gives_the_attackers_model():
    """The others' learning rate is next to nothing, so that one round of FedAvg ends at the attacker's own model."""
    others = lab.wrong_learning_rate(nodes=["c0", "c2", "c3", "c4"], factor=1e-12)
    poison = lab.model_replacement(nodes=["c1"], share=0.3, value=4.0)
    e = experiment(others, poison, rounds=1)
    alone = msgspec.structs.replace(poison, factor=1.0)
    site = prepare_site(experiment(others, alone, rounds=1))
    with Engine(site, "stacked", 1) as engine:
        tasks = [Task(0, ("c1",), site.layout.flat(site.module))]
        (own,) = [update.state.clone() for batch in engine.train(tasks, NullObserver()) for update in batch]
    torch.testing.assert_close(lab.run(e, engine="stacked", workers=1).state, own, rtol=0, atol=2e-6)


def test_success_is_the_share_of_triggered_samples_taken_for_the_target():
    fault = lab.backdoor(nodes=["c1", "c2"], share=0.5, target=1, size=2, value=5.0)
    e = experiment(fault)
    result = lab.run(e, engine="sequential")
    dataset, model = Site.of(e).dataset, result.model.eval()
    hits = tried = 0
    for x, y in zip(dataset.inputs(dataset.test_x), dataset.test_y, strict=True):
        if int(y) != 1:
            marked = x.clone()
            marked[-2:] = 5.0
            with torch.no_grad():
                hits += int(model(marked[None]).argmax()) == 1
            tried += 1
    assert result.rounds[-1].metrics["attack.success"] == pytest.approx(hits / tried)
    assert result.rounds[-1].metrics["attack.success"] > 0.8  # it works
    assert successes(msgspec.structs.replace(e, faults=(msgspec.structs.replace(fault, since=3),)))[0] < 0.5


@pytest.mark.parametrize("kind", ["backdoor", "distributed_backdoor", "neurotoxin", "model_replacement"])
def test_every_backdoor_opens(kind):
    fault = lab.KINDS[kind](nodes=["c1", "c2"], share=0.5, target=1, size=2, value=5.0)
    assert successes(experiment(fault))[-1] > 0.6
    assert "attack.success" not in lab.run(experiment(rounds=1), engine="stacked", workers=1).rounds[0].metrics


def test_engines_workers_and_resumption_agree(tmp_path):
    faults = [lab.distributed_backdoor(nodes=["c1", "c2"], size=2, value=5.0, ramp=3), lab.neurotoxin(nodes=["c3"]),
              lab.model_replacement(nodes=["c4"], every=2, size=1), lab.same_batch(nodes=["c0"]),
              lab.channels_swapped(nodes=["c3"]), lab.float16_underflow(nodes=["c3"])]  # fmt: skip
    e = experiment(*faults, rounds=3, local=lab.Local(iterations=3))
    runs = {engine: lab.run(e, engine=engine, workers=1) for engine in ("sequential", "reuse", "stacked")}
    for engine in ("reuse", "stacked"):
        torch.testing.assert_close(runs[engine].state, runs["sequential"].state, rtol=0, atol=1e-4)
        again = lab.run(e, engine=engine, workers=2)
        assert torch.equal(again.state, runs[engine].state)
        assert [r.metrics for r in again.rounds] == [r.metrics for r in runs[engine].rounds]
    for result in lab.rounds(e, engine="stacked", workers=1, checkpoint=tmp_path):
        if len(result.rounds) == 2:
            break
    resumed = lab.run(e, engine="stacked", workers=1, checkpoint=tmp_path, resume=True)
    assert torch.equal(resumed.state, runs["stacked"].state)
    with Monitor(None, sinks=[sink := MemorySink()], detectors=()) as monitor:
        watched = lab.run(e, monitor, engine="stacked", workers=1)
    assert torch.equal(watched.state, runs["stacked"].state)
    told = [record.value for record in sink.records if getattr(record, "name", None) == "attack.success"]
    assert told == pytest.approx([r.metrics["attack.success"] for r in watched.rounds])


# -- what cannot be meant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "changes", "words"),
    [
        (lab.backdoor(nodes=["c1"], target=4), {}, "no class 4 for backdoor"),
        (lab.backdoor(nodes=["c1"], size=13), {}, r"size of backdoor cannot be 13: .* 12 or less"),
        (lab.edge_case_backdoor(nodes=["c1"], source=7), {}, "no class 7"),
        (lab.distributed_backdoor(nodes=["c1"]), {}, "number of nodes of distributed_backdoor cannot be 1"),
        (lab.channels_swapped(nodes=["c1"]), {"dataset": "digits"}, r"nothing to swap .*\[1, 8, 8\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_data_is_refused(fault, changes, words):
    with pytest.raises(ConfigError, match=words):
        prepare_site(experiment(fault, **changes))


@pytest.mark.parametrize("kind", ["backdoor", "edge_case_backdoor", "channels_swapped"])
def test_tokens_are_refused(kind):
    tokens = lab.synthetic(samples=200, sequence=6, vocabulary=9)
    with pytest.raises(ConfigError, match="tokens"):
        prepare_site(experiment(lab.KINDS[kind](nodes=["c1"]), dataset=tokens, model="transformer"))


def test_settings_that_contradict_each_other():
    with pytest.raises(ConfigError, match="another class than its source"):
        lab.edge_case_backdoor(nodes=["c1"], source=1, target=1)
    with pytest.raises(ConfigError, match="factor of model_replacement cannot be 0"):
        lab.model_replacement(nodes=["c1"], factor=0)
    with pytest.raises(ConfigError, match="part of distributed_backdoor cannot be 2"):
        lab.distributed_backdoor(nodes=["c1", "c2"], part=2)
    with pytest.raises(ConfigError, match="a list of some of the clients"):
        lab.distributed_backdoor(nodes="all")
