# SPDX-License-Identifier: Apache-2.0
"""States on another device, pretended here: nothing of the lab mixes devices, waits in vain, or counts otherwise."""

from __future__ import annotations

import pytest
import torch

import fedvitals as fv
from fedvitals import lab
from fedvitals.kernels.sketch import COSINE_ERROR
from fedvitals.lab.aggregators.averages import AggregationError
from fedvitals.lab.topologies.exchanges import average, exchange_for_stack, pass_to_next
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Sketch
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each
from support.device_cases import CASES, CLIENTS, TOPOLOGIES, Doctor, experiment
from support.lab.by_hand import Watcher
from support.pretended_device import DEVICE, DeviceTensor, PretendedEngine, Pretending


def away(e, observer=None, **more):
    with Pretending():
        return lab.run(e, observer, engine=PretendedEngine, **more)


def here(e, observer=None, **more):
    return lab.run(e, observer, engine="stacked", workers=1, **more)


def alike(a, b):
    """To rounding: who is masked divides in float32, and sums of a device are in another order."""
    assert a.is_cpu
    assert type(a) is torch.Tensor
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.thorough  # quick each, and many
@pytest.mark.parametrize("name", CASES)
def test_what_lies_on_a_device_stays_there(name):
    e = experiment(name)
    result, expected = away(e), here(e)
    alike(result.state, expected.state)
    assert holds_for_each(loss.is_cpu for loss in result.rounds[-1].losses.values())


@pytest.mark.thorough
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_an_ordinary_round_waits_for_nobody(name):
    """Once a round for the new model, and where clusters are told apart; whatever the number of clients."""
    e = experiment(name, rounds=3)
    DeviceTensor.waits.clear()
    away(e)
    assert DeviceTensor.waits.total() <= (1 + 3 * 3 if "cluster" in name else 1 + 3), DeviceTensor.waits


@pytest.mark.thorough
def test_a_watched_round_waits_a_few_times_for_all_clients():
    for clients in (CLIENTS, 2 * CLIENTS):
        sink = MemorySink()
        DeviceTensor.waits.clear()
        with Monitor(None, sinks=[sink], strict=True) as monitor:
            result = away(experiment(clients=clients, rounds=3), monitor)
        assert DeviceTensor.waits.total() <= 3 * 16, DeviceTensor.waits
        watched = {(r.name, r.where.round, r.where.node): r.value for r in sink.records if type(r).__name__ == "Metric"}
        again = MemorySink()
        with Monitor(None, sinks=[again], strict=True) as monitor:
            alike(result.state, here(experiment(clients=clients, rounds=3), monitor).state)
        for r in again.records:
            if type(r).__name__ == "Metric" and r.name.startswith("update."):
                found = watched[r.name, r.where.round, r.where.node]
                assert found == pytest.approx(r.value, rel=1e-4, abs=1e-5), r


def compared(train, **settings):
    """The sink of a watched run, and its cosines by metric, round and client."""
    sink = MemorySink()
    with Monitor(None, sinks=[sink], strict=True, **settings) as monitor:
        train(experiment(), monitor)
    names = ("update.cosine_mean", "update.cosine_previous")
    return sink, {(m.name, m.where.round, m.where.node): m.value for name in names for m in sink.metrics(name)}


def test_updates_that_do_not_fit_into_memory_are_compared_by_their_sketches():
    """On the device as on the CPU, and as the whole updates would have been, to the error of a sketch."""
    sink, cosines = compared(away, update_memory=1000)
    assert len(sink.events("updates.approximate")) == 1
    sketches, expected = ({(s.where.round, s.where.node): s.values for s in run.of(Sketch)}
                          for run in (sink, compared(here, update_memory=1000)[0]))  # fmt: skip
    assert len(sketches) == 2 * CLIENTS
    assert sketches.keys() == expected.keys()
    for place, numbers in sketches.items():
        assert numbers == pytest.approx(expected[place], rel=1e-4, abs=1e-5), place
    _, exact = compared(away)
    assert len(exact) == (2 + 1) * CLIENTS  # in the first round there is no previous one
    assert cosines.keys() == exact.keys()
    assert cosines != exact
    for place, cosine in cosines.items():
        assert cosine == pytest.approx(exact[place], abs=5 * COSINE_ERROR), place


def test_duplicates_are_found_on_a_device():
    sink = MemorySink()
    with Monitor(None, sinks=[sink], strict=True) as monitor:
        away(experiment(faults=[lab.duplicate(nodes=["c1"], of="c4")], rounds=1), monitor)
    assert sink.value("update.duplicates", node="c1") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["centralized", "hierarchical", "asynchronous"])
def test_corrections(name):
    doctors = Doctor(), Doctor()
    alike(away(experiment(name, rounds=4), doctors[0]).state, here(experiment(name, rounds=4), doctors[1]).state)
    assert doctors[0].told == doctors[1].told


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["clustered", "asynchronous", "aggregator fedadam", "fault stale_update"])
def test_a_run_that_was_stopped_goes_on(name, tmp_path):
    whole = away(experiment(name, rounds=4)).state
    with Pretending():
        going = lab.rounds(experiment(name, rounds=4), engine=PretendedEngine, checkpoint=tmp_path)
        next(going), next(going)
        going.close()
    assert torch.equal(away(experiment(name, rounds=4), checkpoint=tmp_path, resume=True).state, whole)
    assert torch.equal(away(experiment(name, rounds=4), checkpoint=tmp_path, resume=True).state, whole)  # it is done


@pytest.mark.thorough
def test_optimisers_that_are_kept_and_a_tape(tmp_path):
    e = experiment(local=lab.Local(iterations=3, batch=4, optimizer=lab.adam(), keep_optimizer=True), rounds=3)
    with Monitor(tmp_path / "runs.db", tape=fv.Tape(), strict=True, host="lab") as monitor:
        alike(away(e, monitor).state, here(e).state)


def test_what_falls_back_is_told_once():
    watcher = Watcher()
    away(experiment("compression int8"), watcher)
    assert [data for name, _, data in watcher.told if name == "device.fallback"] == [
        {"part": "int8", "from": DEVICE.type, "to": "cpu"}
    ]
    quiet = Watcher()
    here(experiment("compression int8"), quiet)
    away(experiment(), quiet)
    assert "device.fallback" not in {name for name, *_ in quiet.told}


# -- all groups at once -----------------------------------------------------------------------------------------------

GROUPS = {
    "equal": [slice(0, 3), slice(3, 6), slice(6, 9)],
    "unequal": [slice(0, 1), slice(1, 6), slice(6, 9)],
    "not all": [slice(1, 3), slice(4, 8)],
    "one": [slice(0, 9)],
    "of one each": [slice(i, i + 1) for i in range(9)],
    "an empty one": [slice(0, 4), slice(4, 4), slice(4, 9)],
}


def one_by_one(exchange, groups, states, samples):
    states = states.clone()
    for group in groups:
        if group.stop > group.start:
            states[group] = exchange(states[group], samples[group])
    return states


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("exchange", [average, pass_to_next])
@pytest.mark.parametrize("spoilt", [None, torch.nan, torch.inf])
def test_all_groups_at_once_are_as_one_by_one(exchange, groups, spoilt, monkeypatch):
    monkeypatch.setattr("fedvitals.lab.topologies.exchanges.MAX_NUMBERS", 40)  # several stretches of a state
    stream = torch.Generator().manual_seed(1)
    states, samples = torch.randn(9, 17, generator=stream), torch.randint(1, 50, (9,), generator=stream)
    if spoilt is not None:
        states[4, 3] = spoilt  # of a first member of some groups, and of others in the midst
    expected = one_by_one(exchange, GROUPS[groups], states, samples.float())
    exchanged = exchange_for_stack(exchange, GROUPS[groups], samples, "cpu")
    assert exchanged is not None
    found = states.clone()
    exchanged(found)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
    if exchange is pass_to_next:
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_who_has_no_samples_is_not_heard():
    states, samples = torch.tensor([[torch.nan], [2.0], [4.0]]), torch.tensor([0, 1, 3])
    exchanged = exchange_for_stack(average, [slice(0, 3)], samples, "cpu")
    assert exchanged is not None
    exchanged(states)
    assert states.flatten().tolist() == [3.5, 3.5, 3.5]
    with pytest.raises(AggregationError, match="total weight"):
        exchange_for_stack(average, [slice(0, 1), slice(1, 3)], samples, "cpu")


def test_an_exchange_of_ones_own_is_left_to_the_caller():
    assert exchange_for_stack(lambda states, _: states, [slice(0, 2)], torch.ones(2), "cpu") is None


@pytest.mark.parametrize("exchange", [average, pass_to_next])
def test_groups_are_exchanged_without_waiting(exchange):
    with Pretending():
        exchanged = exchange_for_stack(exchange, GROUPS["unequal"], torch.arange(1, 10), DEVICE)
        states = torch.randn(9, 17).to(DEVICE)
        DeviceTensor.waits.clear()
        assert exchanged is not None
        exchanged(states)
        assert not DeviceTensor.waits
