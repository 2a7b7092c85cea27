# SPDX-License-Identifier: Apache-2.0
"""When faults act and how strongly: intermittent and ramping ones against lists of plain ones, and whole edges."""

from __future__ import annotations

import itertools

import pytest
import torch

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.engines.site import Site
from fedvitals.lab.faults import table as fault_table
from fedvitals.monitor.monitor import Monitor
from fedvitals.testing import MemorySink
from support.lab.faulty_training import CLASSES, KINDS, NODES, bits, data, fault_of, outcome

SMALL = {"dataset": lab.synthetic(samples=240), "model": "logistic", "clients": 6, "rounds": 7, "seed": 3}
RAMPED = {kind for kind, cls in KINDS.items() if cls.strength_field is not None}


def experiment(*faults, **changes):
    return lab.Experiment(**{**SMALL, "local": lab.Local(iterations=2), "faults": faults, **changes})


def state(*faults, engine="stacked", **changes):
    return lab.run(experiment(*faults, **changes), engine=engine, workers=1).state


def test_every_third_round():
    fault = lab.scaling(nodes=["c1"], since=2, until=9, every=3)
    assert [number for number in range(14) if fault.active(number, "c1")] == [2, 5, 8]
    assert not fault.active(5, "c2")
    always = lab.scaling(nodes=["c1"], since=2, every=1)
    assert [number for number in range(5) if always.active(number, "c1")] == [2, 3, 4]


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize(("kind", "settings"), [("input_scale", {"factor": 3.0}), ("scaling", {"factor": 5.0}),
                                                ("wrong_learning_rate", {"factor": 4.0})])  # fmt: skip
def test_an_intermittent_run_is_one_with_single_strikes(kind, settings, engine):
    make = lab.KINDS[kind]
    whole = state(make(nodes=["c1"], since=1, every=2, **settings), engine=engine)
    strikes = [make(nodes=["c1"], since=number, until=number, **settings) for number in (1, 3, 5)]
    assert torch.equal(whole, state(*strikes, engine=engine))
    assert not torch.equal(whole, state(make(nodes=["c1"], since=1, **settings), engine=engine))


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("kind", ["input_scale", "scaling", "wrong_learning_rate"])
def test_a_ramp_is_a_list_of_faults_of_growing_strength(kind, engine):
    """factor 5 over 4 rounds: 1 is harmless, so 2, 3, 4, and then 5."""
    make = lab.KINDS[kind]
    whole = state(make(nodes=["c1"], since=1, ramp=4, factor=5.0), engine=engine)
    steps = [make(nodes=["c1"], since=1 + i, until=1 + i, factor=2.0 + i) for i in range(3)]
    assert torch.equal(whole, state(*steps, make(nodes=["c1"], since=4, factor=5.0), engine=engine))


@pytest.mark.parametrize("kind", sorted(RAMPED))
def test_each_round_of_a_ramp_is_the_plain_fault_of_that_strength(kind):
    more = {"deviations": 2.0} if kind == "little_is_enough" else {}
    fault = fault_of(kind, since=1, ramp=3, **more)
    field, full = fault.strength_field, getattr(fault, fault.strength_field)
    for number, share in ((1, 1 / 3), (2, 2 / 3), (3, 1.0), (5, 1.0)):
        strength = fault.harmless + (full - fault.harmless) * share
        plain = fault_of(kind, since=1, **{**more, field: strength if share < 1 else full})
        ramped, wanted = outcome([fault], number, "c1"), outcome([plain], number, "c1")
        for place in ("x", "y", "gradients", "state", "sent", "server"):
            torch.testing.assert_close(ramped[place], wanted[place], rtol=1e-6, atol=1e-7)
        assert ramped["samples"] == wanted["samples"]


def test_wrong_labels_of_a_ramp_stay_wrong():
    y = data()[1]
    fault = lab.label_noise(nodes=["c1"], rate=0.9, ramp=5)
    wrong = [fault_table.apply_data([fault], number, "c1", *data(), CLASSES, 7)[1] != y for number in range(6)]
    counts = [int(mask.sum()) for mask in wrong]
    assert counts == sorted(counts)
    assert counts[0] < counts[2] < counts[4] == counts[5]
    assert all(not (before & ~after).any() for before, after in itertools.pairwise(wrong))


def test_courses_that_cannot_be_meant_are_refused():
    for settings, words in (
        ({"every": 0}, r"\(every\) of scaling cannot be 0: it must be 1 or more"),
        ({"every": 1.5}, "1.5"),
        ({"ramp": 0}, r"\(ramp\) of scaling"),
        ({"ramp": True}, "True"),
    ):
        with pytest.raises(ConfigError, match=words):
            lab.scaling(nodes=["c1"], **settings)
    for kind in set(KINDS) - RAMPED:
        with pytest.raises(ConfigError, match=f"ramp of {kind} cannot be 3: .* no strength that could grow"):
            fault_of(kind, ramp=3)
    with pytest.raises(ConfigError, match="a number of deviations: that is what grows"):
        lab.little_is_enough(nodes=["c1"], ramp=3)
    with pytest.raises(ConfigError, match="every of overfitting"):
        lab.overfitting(every=2)


def test_the_course_stands_in_toml_and_in_the_truth():
    fault = lab.label_noise(nodes=["c1"], since=2, until=9, every=2, ramp=4)
    e = experiment(fault)
    assert lab.read(e.to_toml()) == e
    told = fault.truth()
    assert (told["since"], told["until"], told["every"], told["ramp"]) == (2, 9, 2, 4)
    plain = experiment(lab.label_noise(nodes=["c1"]))
    assert "every" not in plain.to_toml()
    assert "ramp" not in plain.to_toml()  # digests of older experiments stay what they were


def test_several_faults_on_one_client_all_act():
    faults = [fault_of("input_scale", factor=2.0), fault_of("wrong_learning_rate"), fault_of("sign_flip"),
              fault_of("straggler"), fault_of("same_batch")]  # fmt: skip
    together = outcome(faults, 2, "c1")
    for fault in faults:
        alone, healthy = outcome([fault], 2, "c1"), outcome((), 2, "c1")
        place = next(name for name in healthy if bits(alone[name]) != bits(healthy[name]))
        if type(fault).__name__ != "SameBatch":  # whose batch depends on its place in the list
            assert bits(together[place]) == bits(alone[place])
    assert (together["order"] == together["order"][0]).all()


# -- a whole edge -----------------------------------------------------------------------------------------------------


def test_an_edge_stands_for_its_members():
    changes = {"topology": lab.Hierarchical(edges=2), "partition": lab.dirichlet(0.5)}
    members = Site.of(experiment(**changes)).groups["edge-1"]
    assert len(members) == 3
    whole, spelled = lab.sign_flip(nodes=["edge-1"]), lab.sign_flip(nodes=members)
    assert Site.of(experiment(whole, **changes)).experiment.faults == (spelled,)
    assert torch.equal(state(whole, **changes), state(spelled, **changes))
    mixed = Site.of(experiment(lab.crash(nodes=[members[0], "edge-1", "c0"]), **changes)).experiment.faults[0]
    assert mixed.nodes == tuple(dict.fromkeys([*members, "c0"]))


def test_the_truth_of_an_edge_names_its_members():
    e = experiment(lab.sign_flip(nodes=["edge-0"]), topology=lab.Hierarchical(edges=3), rounds=1)
    sink = MemorySink()
    with Monitor(None, sinks=[sink], detectors=()) as monitor:
        lab.run(e, monitor, engine="sequential")
    (truth,) = [record for record in sink.records if type(record).__name__ == "Truth"]
    assert tuple(truth.nodes) == Site.of(e).groups["edge-0"]


def test_rings_have_members_too_and_an_unknown_edge_is_refused():
    e = experiment(lab.crash(nodes=["ring-1"]), topology=lab.Rings(2))
    assert set(Site.of(e).experiment.faults[0].nodes) < set(NODES)
    with pytest.raises(ConfigError, match=r"no node 'edge-7'.*Known: c0, .*edge-0, edge-1\. Did you mean 'edge-1'"):
        lab.run(experiment(lab.crash(nodes=["edge-7"]), topology=lab.Hierarchical(edges=2)))
    with pytest.raises(ConfigError, match="no node 'edge-0'"):
        lab.run(experiment(lab.crash(nodes=["edge-0"])))
