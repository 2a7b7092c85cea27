# SPDX-License-Identifier: Apache-2.0
"""A round is closed whatever step fails: only what that step measures is missing, and the client is named."""

import pytest
import torch

import fedvitals as fv
from fedvitals.monitor.emission import Emission
from fedvitals.probes.cohort import Cohort
from fedvitals.testing import MemorySink
from support.hostile_federation import HONEST, LIAR, ROUNDS, federation, model


def test_an_update_that_cannot_be_read_costs_its_client_alone(caplog):
    """In one call with the others, as a plain loop hands them over."""
    sink, network = MemorySink(), model()
    with fv.Monitor(None, sinks=[sink], machine=False) as monitor:
        for number in range(2):
            with monitor.round(number, network):
                updates = {node: [torch.full_like(p, 0.01) for p in network.parameters()] for node in HONEST}
                monitor.updates(number, {"ann": updates["ann"], LIAR: [object()] * 4, **updates})
    assert {m.where.node for m in sink.metrics("update.norm", round=1)} == {*HONEST}
    assert {event.where.node for event in sink.events("monitor.error")} == {LIAR}
    assert f"(client '{LIAR}')" in caplog.text
    assert [m.where.round for m in sink.metrics("time.round")] == [0, 1]


@pytest.mark.parametrize("updates", [None, 7, {"c0": None}, {None: [torch.ones(3)]}, {"c0": [torch.ones(3), None]}])
def test_updates_that_are_none_never_reach_the_training(updates):
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False) as monitor, monitor.round(0, model()):
        monitor.updates(0, updates)
    assert len(sink.metrics("time.round")) == 1


def test_a_metric_that_is_no_number_does_not_keep_a_round_open():
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False) as monitor:
        monitor.host.round_begin(0, model())
        monitor.host.round_end(0, model(), {"loss": "low", "accuracy": 0.5})
    assert sink.value("accuracy", node=None) == 0.5
    assert len(sink.metrics("time.round")) == 1


@pytest.mark.parametrize(("owner", "name"), [(Cohort, "_of_updates"), (Emission, "columns")])
def test_a_step_that_fails_for_one_client_costs_that_client_alone(owner, name, monkeypatch):
    """No data is known that would make it fail: so it is made to."""
    plain = getattr(owner, name)

    def fails(self, first, second, *more, **named):
        nodes = [update.node for update in first] if owner is Cohort else [node for node, _ in second.keys]
        if "bob" in nodes:
            raise OverflowError("of bob's")
        return plain(self, first, second, *more, **named)

    monkeypatch.setattr(owner, name, fails)
    with federation(lambda _: [], ill=("eve",)) as found:
        for number in range(ROUNDS):
            found.round(number)
    sink = found.sink
    assert [m.where.round for m in sink.metrics("time.round")] == [*range(ROUNDS)]
    assert {event.where.node for event in sink.events("monitor.error")} == {"bob"}
    for node in {*HONEST} - {"bob", "eve"}:
        assert len(sink.metrics("update.norm", node=node)) == len(sink.metrics("update.cosine_mean", node=node)) == 5
    assert ("eve", 2) in found.nan_updates()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "broken",
    [
        "fedvitals.probes.cohort.Cohort.receive",
        "fedvitals.probes.cohort.Cohort.close",
        "fedvitals.probes.updates.UpdateTracker._align_exactly",
        "fedvitals.probes.updates._count_duplicates",
        "fedvitals.probes.updates.UpdateTracker.know",
        "fedvitals.monitor.arrivals.Arrivals.close_round",
        "fedvitals.resources.time_ledger.Ledger.close",
    ],
)
def test_whatever_step_fails_the_round_is_closed(broken, monkeypatch):
    def fails(*_, **__):
        raise OverflowError("of somebody's")

    monkeypatch.setattr(broken, fails)
    with federation(lambda _: []) as found:
        for number in range(3):
            found.round(number)
    assert [m.where.round for m in found.sink.metrics("time.round")] == [0, 1, 2]
    assert len([e for e in found.sink.events("monitor.error") if "OverflowError" in e.message]) >= 1
