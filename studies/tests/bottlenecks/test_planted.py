# SPDX-License-Identifier: Apache-2.0
"""Planted bottlenecks: small versions of the trial, each of which fails if the wrong thing is named."""

import json
import socket
import threading

import msgspec
import pytest

from fedvitals import lab
from fedvitals.analysis.remedies import Remedy
from fedvitals.errors import ConfigError, RecordError
from fedvitals.lab.rerun import apply_remedy, experiment_of, try_remedies, with_changes
from fedvitals.records import Run
from fedvitals_studies.bottlenecks import planted as bottlenecks
from fedvitals_studies.bottlenecks.lab import CLIENTS, KINDS, STRENGTHS, controls, planted, plants
from fedvitals_studies.bottlenecks.real import NODES, real_plants
from fedvitals_studies.bottlenecks.wire import LENGTHS, LONGEST_BODY, receive, send


def remedy(change, after=5.0, factor=1.0):
    return Remedy({}, "a remedy", "", 10.0, after, 10.0 - after, 0.5, "", "", change, factor)


def test_every_kind_is_planted_at_every_strength():
    cases = plants()
    assert {(case.name, case.strength) for case in cases} == {(kind, s) for kind in KINDS for s in STRENGTHS}
    assert len(cases) == len({case.experiment.digest() for case in cases}) == 40
    assert len(real_plants()) >= 10


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_mild_one_is_named_and_its_remedy_gives_what_was_computed(kind):
    (said,) = bottlenecks.in_the_lab([planted(kind, STRENGTHS[0], seed=11)])
    assert said.right, said.verdict.text
    (tried,) = said.tried
    assert tried.before == pytest.approx(said.verdict.seconds)
    assert tried.measured < tried.before
    assert tried.gain_error < 0.15
    assert tried.accuracy_before is not None
    assert tried.accuracy_after is not None


def test_a_verdict_on_something_else_is_wrong():
    """The judge of the trial itself: another kind, another client or another cause does not pass for the right one."""
    (said,) = bottlenecks.in_the_lab([planted("straggler by upload", 0.75)], most=0)
    assert said.right
    for change in ({"kind": "upload"}, {"bound_by": "compute"}, {"stragglers": ("c4",)}):
        plant = type(said.plant)(**{name: getattr(said.plant, name) for name in said.plant.__slots__} | change)
        assert not bottlenecks.PlantedVerdict(plant, said.verdict, said.times, said.remedies).right


def test_a_balanced_federation_is_not_accused():
    (said,) = bottlenecks.in_the_lab(controls()[1:2])
    assert said.verdict.kind == "nothing"
    assert said.tried == ()


def test_changes_reach_the_experiment():
    experiment = planted("data-loading-bound", 0.6).experiment
    change, again = apply_remedy(
        experiment, remedy({"local.epochs": {"times": 0.5}, "local.iterations": {"times": 0.5}})
    )
    assert change == {"local.iterations": 4}, "epochs are not set there, and stay so"
    assert again.local.iterations == 4
    again = with_changes(experiment, {"network.server": {"faster": 4}})
    before, after = (one.network.profiles[one.network.server] for one in (experiment, again))
    assert after.flops_per_second == 4 * before.flops_per_second
    again = with_changes(experiment, {"network.devices": {"loading": 4}})
    rate = experiment.network.profiles["device"].samples_per_second
    assert again.network.profiles["device"].samples_per_second == 4 * rate
    assert with_changes(experiment, {"compression": {"kind": "int8"}}).compression == lab.int8()
    assert with_changes(experiment, {"network.deadline_seconds": 3.0}).network.deadline_seconds == 3.0


def test_what_cannot_be_run_is_said_or_left_out():
    experiment = planted("compute-bound", 0.6).experiment
    with pytest.raises(ConfigError, match="cannot run"):
        apply_remedy(experiment, remedy(None))
    with pytest.raises(ConfigError, match="changes nothing"):
        apply_remedy(experiment, remedy({"local.epochs": {"times": 0.5}}))
    with pytest.raises(ConfigError, match="cannot set"):
        with_changes(experiment, {"network.devices": {"magic": 2}})
    impossible = remedy({"topology": {"kind": "asynchronous", "buffer": CLIENTS + 1}})
    assert try_remedies(experiment, [remedy(None), impossible]) == []
    with pytest.raises(ConfigError, match="has no network"):
        try_remedies(msgspec.structs.replace(experiment, network=None), [])


def test_a_stored_run_of_the_lab_gives_its_experiment_back():
    experiment = lab.Experiment(dataset="digits", model="mlp", clients=4, network=lab.Network(links="4g"))
    assert experiment_of(Run("r", "r", config={"experiment": experiment.to_toml()})) == experiment
    with pytest.raises(ConfigError, match="keeps no experiment"):
        experiment_of(Run("r", "r"))


# -- real processes ---------------------------------------------------------------------------------------------------


def test_messages_arrive_whole_and_lying_ones_are_refused():
    here, there = socket.socketpair()
    with here, there:
        body = bytes(range(256)) * 100
        sender = threading.Thread(target=send, args=(here, {"round": 3}, body, 1e6))
        sender.start()
        assert receive(there) == ({"round": 3}, body)
        sender.join()
        here.sendall(LENGTHS.pack(2, LONGEST_BODY + 1))
        with pytest.raises(RecordError, match="too long"):
            receive(there)
        told = json.dumps([1]).encode()
        here.sendall(LENGTHS.pack(len(told), 0) + told)
        with pytest.raises(RecordError, match="no table"):
            receive(there)
        here.close()
        with pytest.raises(EOFError):
            receive(there)


@pytest.mark.thorough
def test_processes_are_judged_from_the_store_whatever_a_clock_says():
    """One for all clients, and a straggler whose clock is an hour behind; the parts explain what was measured."""
    by_name = {plant.name: plant for plant in real_plants()}
    cases = [by_name["throttled uploads"], by_name["one slow data set, its clock one hour behind"]]
    said = bottlenecks.on_processes(cases)
    assert [one.right for one in said] == [True, True], [one.verdict.text for one in said]
    for one in said:
        for time in one.times:
            assert set(NODES) <= set(time.nodes)
            for node in time.nodes.values():
                assert sum(node.parts.values()) == pytest.approx(time.seconds, rel=0.02)
                assert min(node.parts.values()) >= 0
