# SPDX-License-Identifier: Apache-2.0
"""The lab on a GPU: every part gives what the CPU's twin gives, the same each time, and nothing waits in vain."""

from __future__ import annotations

import pytest
import torch

import fedvitals as fv
from fedvitals import lab
from fedvitals.lab.aggregators.averages import FedAdam, FedAvg, FedAvgM
from fedvitals.lab.aggregators.robust import NormClipping
from fedvitals.lab.topologies.exchanges import average, exchange_for_stack, pass_to_next
from fedvitals.protocols import NullObserver
from fedvitals.testing import MemorySink
from support.device_cases import CASES, TOPOLOGIES, Doctor, experiment

pytestmark = pytest.mark.gpu

# What is only there after some rounds; of all others one round is compared.
LATER = {"clustered", "one cluster", "asynchronous", "population", "fault stale_update", "fault free_rider"}
LATER |= {"aggregator scaffold", "aggregator feddyn", "scaffold, half of the clients", "feddyn, momentum, clipped"}
LATER |= {"fault neurotoxin", "fault backdoor, growing"}
ONE_BIT = {"compression sign", "aggregator majority_vote"}  # where rounding near 0 turns a whole step round
TWICE = [*TOPOLOGIES, "adam", "epochs", "images", "images, edges", "aggregator median", "aggregator multi_krum"]
TWICE += ["population", "aggregator scaffold", "weight decay", "aggregator fedadam", "fault gaussian"]
TWICE += ["fault label_noise", "compression top_k", "error feedback", "client_dp", "central_dp", "secure aggregation"]


def on_gpu(e, observer=None, **more):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return lab.run(e, observer, engine="stacked", device="cuda", **more)


def alike(computed, expected, rtol=1e-4, atol=2e-5):
    assert computed.is_cpu
    torch.testing.assert_close(computed, expected, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("name", [*CASES])
def test_it_gives_what_the_cpu_gives(name):
    e = experiment(name, rounds=3 if name in LATER else 1)
    found = on_gpu(e)
    expected = lab.run(e, engine="sequential")
    if name in ONE_BIT:
        assert float(((found.state - expected.state).abs() > 2e-5).double().mean()) < 0.01
    else:
        alike(found.state, expected.state)
    assert {*found.rounds[-1].losses} == {*expected.rounds[-1].losses}
    for node, losses in found.rounds[-1].losses.items():
        alike(losses, expected.rounds[-1].losses[node], rtol=1e-3)
    assert {*found.rounds[-1].metrics} == {*expected.rounds[-1].metrics}


@pytest.mark.parametrize("name", TWICE)
def test_it_is_the_same_each_time(name):
    states = [on_gpu(experiment(name, rounds=3)).state for _ in range(2)]
    assert torch.equal(states[0].nan_to_num(7.0), states[1].nan_to_num(7.0))


class Seeing(NullObserver):
    def __init__(self):
        self.seen, self.told = [], []

    def updates(self, number, updates):
        self.seen += [piece.device.type for pieces in updates.values() for piece in pieces]
        return ()

    def event(self, level, name, message, *, node=None, data=None):
        self.told.append((name, data))


def test_updates_stay_on_the_device():
    seeing = Seeing()
    on_gpu(experiment(), seeing)
    assert {*seeing.seen} == {"cuda"}
    assert "device.fallback" not in {name for name, _ in seeing.told}


def test_what_falls_back_is_told_once():
    seeing = Seeing()
    on_gpu(experiment("compression int8"), seeing)
    told = [data for name, data in seeing.told if name == "device.fallback" and data and data.get("part") == "int8"]
    assert told == [{"part": "int8", "from": "cuda", "to": "cpu"}]


def test_aggregation_waits_for_nobody():
    """torch raises on any synchronisation here: of the averages, of clipping to a norm, and of exchanges."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    states = torch.randn(9, 1000)
    start, there = torch.zeros(1000).cuda(), states.cuda()
    groups, samples = [slice(0, 2), slice(2, 6), slice(6, 9)], torch.arange(1, 10)
    exchanges = {kind: exchange_for_stack(kind, groups, samples, "cuda") for kind in (average, pass_to_next)}
    found, torch_mode = {}, torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rule in (FedAvg(), FedAvgM(), FedAdam(), NormClipping(norm=1.0)):
            running = rule.begin(start, {}, 990)
            for row in range(9):
                running.add(there[row], row + 1.0, f"c{row}")
            found[rule] = running.finish()
        exchanged = {}
        for kind, exchange in exchanges.items():
            exchanged[kind] = there.clone()
            assert exchange is not None
            exchange(exchanged[kind])
    finally:
        torch.cuda.set_sync_debug_mode(torch_mode)
    for rule, state in found.items():
        running = rule.begin(start.cpu(), {}, 990)
        for row in range(9):
            running.add(states[row], row + 1.0, f"c{row}")
        alike(state.cpu(), running.finish(), atol=1e-6)
    for kind, state in exchanged.items():
        expected = torch.cat([kind(states[group], samples[group].float()) for group in groups])
        alike(state.cpu(), expected, atol=1e-6)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_group(spoilt):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    states = torch.randn(7, 50)
    states[0, 3] = spoilt
    exchange = exchange_for_stack(average, [slice(0, 2), slice(2, 7)], torch.ones(7), "cuda")
    there = states.cuda()
    assert exchange is not None
    exchange(there)
    bad = ~there.isfinite().cpu()
    assert bad[:2, 3].all()
    assert bad.sum() == 2


@pytest.mark.parametrize("name", ["centralized", "hierarchical", "asynchronous"])
def test_corrections(name):
    doctors = Doctor(), Doctor()
    found = on_gpu(experiment(name, rounds=3), doctors[0]).state
    alike(found, lab.run(experiment(name, rounds=3), doctors[1], engine="sequential").state)
    told = [one for one in doctors[0].told if one[0] != "device.fallback"]
    assert told == doctors[1].told


def test_optimisers_that_are_kept():
    """Against the stacked engine of the CPU: no other keeps them."""
    e = experiment(local=lab.Local(iterations=3, batch=4, optimizer=lab.sgd(0.05, 0.9), keep_optimizer=True), rounds=3)
    alike(on_gpu(e).state, lab.run(e, engine="stacked", workers=1).state)


@pytest.mark.parametrize("name", ["centralized", "clustered", "asynchronous", "aggregator fedyogi", "images"])
def test_a_run_that_was_stopped_goes_on_to_the_last_bit(name, tmp_path):
    pytest.importorskip("safetensors")
    e = experiment(name, rounds=4)
    whole = on_gpu(e).state
    going = lab.rounds(e, engine="stacked", device="cuda", checkpoint=tmp_path / "saved")
    next(going), next(going)
    going.close()
    assert torch.equal(on_gpu(e, checkpoint=tmp_path / "saved", resume=True).state, whole)


def _metrics(sink):
    return {(r.name, r.where.round, r.where.node): r.value for r in sink.records if type(r).__name__ == "Metric"}


@pytest.mark.parametrize("name", ["centralized", "hierarchical, uneven", "images"])
def test_it_is_watched_and_not_changed(name):
    """The monitor's comparisons of updates are those of the CPU, and no bit of the training is another."""
    e, sinks = experiment(name, rounds=2), (MemorySink(), MemorySink())
    with fv.Monitor(None, sinks=[sinks[0]], strict=True) as monitor:
        watched = on_gpu(e, monitor)
    assert torch.equal(watched.state, on_gpu(e).state)
    with fv.Monitor(None, sinks=[sinks[1]], strict=True) as monitor:
        lab.run(e, monitor, engine="stacked", workers=1)
    found, expected = map(_metrics, sinks)
    names = {"update.norm", "update.cosine_mean", "update.cosine_previous", "update.samples", "weight.drift"}
    compared = [key for key in expected if key[0] in names]
    assert {key[0] for key in compared} == names
    for key in compared:
        assert abs(found[key] - expected[key]) <= 1e-3 * abs(expected[key]) + 1e-4, key


def test_copies_are_found():
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor:
        on_gpu(experiment(faults=[lab.duplicate(nodes=["c1"], of="c4")], rounds=1), monitor)
    assert sink.value("update.duplicates", node="c1") == 1


def test_a_tape_proves_the_run(tmp_path):
    pytest.importorskip("blake3")
    store = tmp_path / "runs.db"
    with fv.Monitor(store, "taped", host="lab", tape=fv.Tape(), strict=True) as monitor:
        on_gpu(experiment("hierarchical", rounds=3), monitor)
    with fv.open_replay("taped", store) as session:
        proof = session.verify()
    assert proof.holds, proof
    assert proof.proved == [0, 1, 2]
    assert proof.deviation == 0  # no bits are promised on CUDA, and none is another here
