# SPDX-License-Identifier: Apache-2.0
"""What ill clients send, by hand: each attack is what its paper says, and links fail as told."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import pytest
import torch

from fedvitals.lab.engines.tasks import Update
from fedvitals.lab.faults import table as ill
from fedvitals.lab.faults.federation import ServerRateTooHigh, ServerRateTooLow
from fedvitals.lab.faults.links import (
    ClockSkew,
    CorruptedMessage,
    DropOut,
    LostMessage,
    Straggler,
    TelemetryLost,
    Timeout,
)
from fedvitals.lab.faults.updates import (
    DtypeMismatch,
    Duplicate,
    FreeRider,
    Gaussian,
    InnerProduct,
    LittleIsEnough,
    Scaling,
    ShapeMismatch,
    SignFlip,
    StaleUpdate,
    WrongSampleCount,
    ZeroWeight,
)
from fedvitals.lab.network.virtual_clock import Journey
from support.conditions import holds_for_each
from support.lab.faulty_training import LAYOUT, NODES, Past, updates

WEIGHTS = LAYOUT.weights
C1 = {"nodes": ["c1"]}


def send(*faults, past=None, number=2, edit=None):
    """A cohort's updates after these faults, by node; and as they were."""
    past = past or Past()
    honest, sent = updates(past), updates(past)
    for cohort in (honest, sent):
        if edit is not None:
            edit(cohort)
    for update in sent:
        ill.apply_update(faults, number, update, past, 7)
    ill.apply_collusion(faults, number, sent, past, 7)
    return {u.node: u for u in honest}, {u.node: u for u in sent}


def change(update: Update) -> torch.Tensor:
    return (update.state - update.start)[:WEIGHTS]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# -- alone ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "factor"), [(SignFlip(**C1), -1), (SignFlip(3.0, **C1), -3), (Scaling(**C1), 10), (Scaling(0, **C1), 0)]
)
def test_multiples_of_the_update(fault, factor):
    was, sent = send(fault)
    close(change(sent["c1"]), factor * change(was["c1"]))
    assert torch.equal(sent["c1"].state[WEIGHTS:], was["c1"].state[WEIGHTS:])  # buffers are the client's own


@pytest.mark.parametrize("strength", [0.5, 2.0])
def test_gaussian(strength):
    was, sent = send(Gaussian(strength, **C1))
    noise, honest = change(sent["c1"]), change(was["c1"])
    assert float(noise.norm() / honest.norm()) == pytest.approx(strength, rel=0.3)
    assert abs(float(torch.cosine_similarity(noise, honest, 0))) < 0.4
    added = change(send(Gaussian(strength, add=True, **C1))[1]["c1"])
    close(added - honest, noise)
    assert not torch.equal(change(send(Gaussian(strength, **C1), number=3)[1]["c1"]), noise)  # anew in each round


def test_stale_update_builds_on_the_model_of_then():
    past = Past()
    was, sent = send(StaleUpdate(3, **C1), past=past)
    close(sent["c1"].state[:WEIGHTS] - past.model(3)[:WEIGHTS], change(was["c1"]))
    assert torch.equal(sent["c1"].start, was["c1"].start)
    assert ill.history_length([StaleUpdate(3, **C1), FreeRider(**C1), SignFlip(**C1)]) == 3
    assert ill.history_length([]) == 0


def test_a_stale_client_of_a_young_run_has_the_first_model():
    past = Past(rounds=2)
    was, sent = send(StaleUpdate(5, **C1), past=past)
    close(sent["c1"].state[:WEIGHTS] - past.model(2)[:WEIGHTS], change(was["c1"]))
    was, sent = send(StaleUpdate(5, **C1), past=Past(rounds=0))
    assert torch.equal(sent["c1"].state, was["c1"].state)


def test_a_free_rider_sends_the_last_step_again():
    past = Past()
    step = (past.model(0) - past.model(1))[:WEIGHTS]
    _, sent = send(FreeRider(noise=0.0, **C1), past=past)
    close(change(sent["c1"]), step)
    assert torch.equal(sent["c1"].state[WEIGHTS:], sent["c1"].start[WEIGHTS:])  # it has not trained
    noisy = change(send(FreeRider(noise=0.2, **C1), past=past)[1]["c1"]) - step
    assert float(noisy.norm() / step.norm()) == pytest.approx(0.2, rel=0.3)
    _, first = send(FreeRider(**C1), past=Past(rounds=0))
    assert torch.equal(first["c1"].state, first["c1"].start)


def test_counts_shapes_and_types():
    was, sent = send(WrongSampleCount(0.5, **C1))
    assert (was["c1"].samples, sent["c1"].samples) == (51, 26)
    assert {u.samples for u in send(ZeroWeight())[1].values()} == {0}
    assert len(send(ShapeMismatch(4, **C1))[1]["c1"].state) == LAYOUT.size - 4
    assert len(send(ShapeMismatch(10**6, **C1))[1]["c1"].state) == 0
    halves = send(DtypeMismatch("float16", **C1))[1]["c1"].state
    assert halves.dtype == torch.float16


def test_who_failed_sends_nothing_to_spoil():
    def fail(cohort):
        cohort[1].error, cohort[1].state = "RuntimeError", cohort[1].start

    for fault in (SignFlip(**C1), Duplicate(**C1), LittleIsEnough(**C1), InnerProduct(**C1), WrongSampleCount(**C1)):
        was, sent = send(fault, edit=fail)
        assert sent["c1"].state is sent["c1"].start
        assert sent["c1"].samples == was["c1"].samples


# -- together ---------------------------------------------------------------------------------------------------------


def test_a_duplicate_is_one_to_the_last_bit_or_nearly():
    was, sent = send(Duplicate("c4", **C1))
    assert torch.equal(sent["c1"].state, was["c4"].state)
    assert torch.equal(sent["c4"].state, was["c4"].state)
    drawn = {next(n for n in NODES if torch.equal(send(Duplicate(**C1), number=r)[1]["c1"].state, was[n].state))
             for r in range(8)}  # fmt: skip
    assert "c1" not in drawn
    assert len(drawn) > 1
    noisy = change(send(Duplicate("c4", noise=0.1, **C1))[1]["c1"]) - change(was["c4"])
    assert float(noisy.norm() / change(was["c4"]).norm()) == pytest.approx(0.1, rel=0.3)
    was, sent = send(Duplicate("c77", **C1))  # not there in this round
    assert torch.equal(sent["c1"].state, was["c1"].state)


def test_a_duplicate_of_a_peer_that_began_elsewhere_is_its_change():
    def elsewhere(cohort):
        cohort[4].start = cohort[4].start + 1
        cohort[4].state = cohort[4].state + 1

    was, sent = send(Duplicate("c4", **C1), edit=elsewhere)
    close(change(sent["c1"]), change(was["c4"]))


def test_a_little_is_enough():
    was, sent = send(LittleIsEnough(1.5, nodes=["c1", "c3"]))
    honest = torch.stack([change(was[n]) for n in ("c0", "c2", "c4", "c5")])
    wanted = honest.mean(0) - 1.5 * honest.std(0, correction=0)
    close(change(sent["c1"]), wanted)
    assert torch.equal(sent["c1"].state[:WEIGHTS], sent["c3"].state[:WEIGHTS])
    assert torch.equal(sent["c0"].state, was["c0"].state)


def test_a_little_is_as_much_as_the_papers_formula_says():
    """Baruch et al.: n = 50 clients, m = 24 attackers: s = 2 supporters needed, z = Φ⁻¹(24 / 26)."""
    formula = LittleIsEnough(**C1)._deviations  # the paper gives its value
    assert formula(50, 24) == pytest.approx(NormalDist().inv_cdf(24 / 26)) == pytest.approx(1.4261, abs=1e-4)
    assert formula(50, 12) == pytest.approx(NormalDist().inv_cdf(24 / 38))
    assert formula(3, 1) == 0.0
    assert 0 <= formula(4, 3) < 10


def test_inner_product_manipulation_turns_the_average():
    was, sent = send(InnerProduct(5.0, nodes=["c1", "c3"]))
    honest = torch.stack([change(was[n]) for n in ("c0", "c2", "c4", "c5")]).mean(0)
    close(change(sent["c1"]), -5 * honest)
    average = torch.stack([change(update) for update in sent.values()]).mean(0)
    assert float(average @ honest) < 0


def test_attackers_leave_out_what_cannot_be_added_up():
    faults = (ShapeMismatch(nodes=["c2"]), DtypeMismatch(nodes=["c4"]), InnerProduct(1.0, **C1))
    was, sent = send(*faults)
    close(change(sent["c1"]), -torch.stack([change(was[n]) for n in ("c0", "c3", "c5")]).mean(0))


def test_with_nobody_honest_in_the_cohort_nothing_changes():
    for fault in (Duplicate(nodes=NODES), LittleIsEnough(nodes=NODES), InnerProduct(nodes=NODES)):
        was, sent = send(fault)
        assert all(torch.equal(sent[n].state, was[n].state) for n in NODES)


# -- links ------------------------------------------------------------------------------------------------------------

WAY = Journey("c1", began=5.0, download=1.0, compute=2.0, upload=3.0)


def travel(fault, number=2, way=WAY):
    return ill.apply_journey([fault], number, way, 7)


def test_the_way_is_made_longer_or_ends():
    assert travel(Straggler(4.0, **C1)) == replace(WAY, compute=8.0)
    assert travel(Timeout(60.0, **C1)) == replace(WAY, upload=63.0)
    assert travel(ClockSkew(-30.0, **C1)) == replace(WAY, clock_offset=-30.0)
    assert travel(DropOut(**C1)) == replace(WAY, available=False)
    assert travel(LostMessage(**C1)) == replace(WAY, lost=True)
    assert travel(CorruptedMessage(**C1)) == replace(WAY, corrupted=True)
    assert travel(CorruptedMessage(silent=True, **C1)) is WAY


@pytest.mark.parametrize(
    ("fault", "field", "bad"),
    [(DropOut(0.3, **C1), "available", False), (LostMessage(0.3, **C1), "lost", True),
     (CorruptedMessage(0.3, **C1), "corrupted", True)],
)  # fmt: skip
def test_some_rounds_are_struck_as_often_as_said(fault, field, bad):
    struck = [number for number in range(300) if getattr(travel(fault, number), field) is bad]
    assert 60 < len(struck) < 120
    assert struck == [number for number in range(300) if getattr(travel(fault, number), field) is bad]
    already = replace(WAY, **{field: bad})
    assert all(travel(fault, number, already) == already for number in range(9))  # and nobody is healed


def test_bits_flip_silently():
    was, sent = send(CorruptedMessage(silent=True, share=0.05, **C1))
    flipped = was["c1"].state.view(torch.int32) ^ sent["c1"].state.view(torch.int32)
    struck = flipped[flipped != 0]
    assert 1 <= len(struck) <= round(0.05 * LAYOUT.size)
    assert holds_for_each(int(bits) & (int(bits) - 1) == 0 for bits in struck)  # one bit each
    some = [send(CorruptedMessage(0.5, silent=True, **C1), number=r)[1]["c1"].state for r in range(20)]
    assert 3 < sum(torch.equal(state, was["c1"].state) for state in some) < 17


def test_telemetry_is_lost_and_nothing_else():
    fault = TelemetryLost(since=2, until=3, **C1)
    assert [ill.telemetry_is_lost([fault], number, "c1") for number in range(1, 5)] == [False, True, True, False]
    assert not ill.telemetry_is_lost([fault], 2, "c2")
    assert not ill.telemetry_is_lost([], 2, "c1")


# -- the server -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "factor"), [(ServerRateTooHigh(), 3.0), (ServerRateTooLow(0.25), 0.25)])
def test_the_servers_step(fault, factor):
    past = Past()
    before, after = past.model(1), past.model(0)
    stepped = ill.apply_server([fault], 0, before, after, WEIGHTS)
    close(stepped[:WEIGHTS] - before[:WEIGHTS], factor * (after - before)[:WEIGHTS])
    assert torch.equal(stepped[WEIGHTS:], after[WEIGHTS:])
    late = type(fault)(since=3)
    assert ill.apply_server([late], 2, before, after, WEIGHTS) is after
