# SPDX-License-Identifier: Apache-2.0
"""Sums over a cohort: for how many clients they may speak; how level, cohort and tracebacks are chosen and shown."""

import contextlib
import json
import logging

import numpy as np
import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals.catalog import LEVELS
from fedvitals.cli.main import main
from fedvitals.diagnosis.examine import DETECTORS
from fedvitals.errors import ConfigError
from fedvitals.probes.cohort import clients_per_layer, clients_per_sum
from fedvitals.records import LayerStats
from fedvitals.stats import FAMILIES, MAX, MIN, SUM
from fedvitals.testing import tiny_run
from fedvitals.transport.privacy import ADDING, PrivacyPolicy, policy_for
from support.models import train, watched

user = logging.getLogger("own.client")


def canary_frame():
    raise KeyError("canary-logged-exception")


def cohort_run(privacy, groups, cohort=10, probes="standard", edge_models=False):
    """One round; `groups` is how many clients each edge has («»: those without)."""
    monitor, sink = watched(probes, privacy=privacy, cohort=cohort)
    with monitor, monitor.round(0, nn.Linear(4, 3)):
        for group, count in groups.items():
            own = nn.Linear(4, 3) if edge_models else None
            with monitor.edge(group, own) if group else contextlib.nullcontext():
                for i in range(count):
                    small_client(monitor, f"{group}c{i}")
    return sink


def small_client(monitor, name, *, watch=True):
    model, data = nn.Linear(4, 3), (torch.randn(8, 4), torch.zeros(8).long())
    with monitor.client(name, model if watch else None, data=data, loss=nn.functional.cross_entropy):
        train(model, torch.optim.SGD(model.parameters(), 0.1), data, 1)


def speakers(sink, family="gradient"):
    return {r.where.node for r in sink.of(LayerStats, family) if r.where.node != "server"}


@pytest.mark.thorough
@pytest.mark.parametrize("privacy", range(5))
@pytest.mark.parametrize("clients", [9, 10])
def test_a_round_speaks_for_ten_or_for_nobody(clients, privacy):
    """At levels 1 and 2; at 0 never, from 3 on each client speaks for itself."""
    sink = cohort_run(privacy, {"": clients})
    alone = {f"c{i}" for i in range(clients)} if privacy >= 3 else set()
    together = {None} if privacy >= 3 or (privacy >= 1 and clients >= 10) else set()
    for family in ("gradient", "gradient.steps", "weight"):
        assert speakers(sink, family) == alone | together


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({"a": 10, "b": 10}, {"a", "b", None}),
        ({"a": 10, "b": 9}, {None}),  # the round less «a» would be «b»
        ({"a": 10, "b": 5, "": 5}, {"a", None}),
        ({"a": 11, "b": 10, "c": 9}, {"a", None}),
        ({"a": 5, "b": 4}, set()),
        ({"a": 5, "b": 5}, {None}),
    ],
)
@pytest.mark.parametrize("privacy", [1, 2])
def test_groups_speak_for_ten_or_for_nobody(groups, expected, privacy):
    """Nor do they by subtraction from the round."""
    assert speakers(cohort_run(privacy, groups)) == expected


def test_k_is_chosen():
    """`cohort=` is in the config and holds."""
    assert speakers(cohort_run(1, {"": 3}, cohort=3)) == {None}
    assert not speakers(cohort_run(1, {"": 3}, cohort=4))
    monitor, _ = watched(cohort=4, privacy=1)
    assert monitor.run.config["fedvitals"] == {
        "probes": "standard",
        "detectors": len(DETECTORS),
        "cure": {"all": "suggest"},
        "false_alarms": 1.0,
        "privacy": 1,
        "cohort": 4,
        "tracebacks": True,
    }
    monitor.close()
    for wrong in (1, 0, True, 2.5):
        with pytest.raises(ConfigError, match="cohort="):
            fv.Monitor(None, cohort=wrong)


@pytest.mark.parametrize("edge_models", [False, True])
def test_summed_metrics_of_an_edge(edge_models):
    """`weight.difference` of an edge is a sum at level 1, a scalar from level 2 on; also that of its own model."""
    for privacy, count, told in ((0, 10, False), (1, 9, False), (1, 10, True), (2, 1, True)):
        sink = cohort_run(privacy, {"a": count}, edge_models=edge_models)
        assert bool(sink.metrics("weight.difference", node="a")) == told


def test_a_sum_is_only_what_adds_up():
    """The smallest and the largest value of a cohort are one client's own, and so are its largest norms."""
    sink = cohort_run(1, {"": 10}, probes="deep")
    matrix = sink.layers("gradient", node=None).matrix
    assert np.isnan(matrix[:, [MIN, MAX]]).all()
    assert np.isfinite(matrix[:, SUM]).all()
    steps = sink.layers("gradient.steps", node=None).matrix
    assert steps[:, 0].tolist() == [10, 10]
    assert np.isnan(steps[:, 2:]).all()
    assert np.isfinite(sink.layers("gradient.histogram", node=None).matrix).all()
    merging = {family.columns for family in FAMILIES.values() if family.merge is not None}
    assert merging == ADDING.keys()


def test_a_layer_that_few_have_trained_keeps_the_sum_back():
    """Clients are counted layer by layer, each once."""
    here, there = np.array([[4.0, 1], [4, 2]]), np.array([[4.0, 1], [0, 0]])
    assert clients_per_layer([(["a"], here[None]), (["b", "b"], np.stack([there, there]))]).tolist() == [2, 1]
    assert clients_per_sum({None: np.array([12, 1])}, 10) == {None: 1}
    assert clients_per_sum({None: np.array([12, 0])}, 10) == {None: 12}
    assert clients_per_sum({"a": np.array([10, 10]), None: np.array([3, 0])}, 10) == {"a": 3, None: 10}


def test_a_family_that_few_have_measured_is_no_cohort():
    """Ten clients in the round, but only one of them with a model."""
    monitor, sink = watched(privacy=1)
    with monitor, monitor.round(0, nn.Linear(4, 3)):
        for i in range(10):
            small_client(monitor, f"c{i}", watch=i == 0)
    assert sink.value("clients") == 10
    assert not speakers(sink)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "level", "tracebacks"), [("torch", 3, True), ("lab", 3, True), ("flower", 2, False), ("fleet", 2, False)]
)
def test_defaults(host, level, tracebacks):
    """At home 3 with tracebacks; in a deployment, of whatever kind, 2 without; what is given holds."""
    assert policy_for(host) == PrivacyPolicy(level, 10, tracebacks)
    monitor = fv.Monitor(None, host=host)
    assert monitor.run.config["fedvitals"]["privacy"] == level
    assert monitor.run.config["fedvitals"]["tracebacks"] == tracebacks
    monitor.close()
    assert policy_for(host, 4, 3, not tracebacks) == PrivacyPolicy(4, 3, not tracebacks)
    for wrong in (-1, 5, True, "2", 2.5):
        with pytest.raises(ConfigError, match="privacy="):
            policy_for(host, wrong)


@pytest.mark.parametrize("privacy", [2, 3, 4])
@pytest.mark.parametrize("tracebacks", [False, True])
def test_tracebacks_have_a_switch_of_their_own(privacy, tracebacks):
    """Of exceptions and of log lines; they need level 3 as well."""
    monitor, sink = watched(privacy=privacy, tracebacks=tracebacks)
    with contextlib.suppress(KeyError), monitor, monitor.round(0), monitor.client("c0"):
        try:
            canary_frame()
        except KeyError:
            user.exception("failed")
            raise
    told = [event for event in sink.events() if "traceback" in event.data]
    assert len(told) == (3 if tracebacks and privacy >= 3 else 0)
    assert ("canary_frame" in str(sink.records)) == (tracebacks and privacy >= 3)
    assert ("canary-logged" in str(sink.records)) == (privacy >= 3)


def test_show_tells_level_and_cohort(tmp_path, capsys):
    """On the card and as JSON; what the level withholds is named as such."""
    tiny_run(tmp_path / "runs.db", privacy=1, cohort=12, rounds=1, strict=True)

    def show(*options):
        with pytest.raises(SystemExit):
            main(["show", "tiny", "--store", str(tmp_path / "runs.db"), *options])
        return capsys.readouterr().out

    text = show()
    assert f"Privacy level 1: {LEVELS[1]}." in text
    assert "at least 12 clients" in text
    assert "Tracebacks: on" in text
    card = json.loads(show("--json"))["result"]
    assert (card["privacy"][0], card["cohort"], card["tracebacks"]) == ("1", 12, True)
    needs = {name: needs for names, needs in card["absent"].items() for name in names.split(", ")}
    assert needs["loss"] == "privacy level 2"
    assert needs["label.entropy"] == "privacy level 3"
