# SPDX-License-Identifier: Apache-2.0
"""A recording at a lower privacy level holds what a monitor of that level would have recorded, and no more."""

import math

import numpy as np
import pytest

import fedvitals as fv
from fedvitals import lab
from fedvitals.catalog import is_update_family, is_update_metric, level_of_metric
from fedvitals.store import MemoryStore
from fedvitals_studies.faultbank.lying import COMPARED
from fedvitals_studies.faultbank.privacy_levels import at_level
from fedvitals_studies.faultbank.recording import Recording

pytestmark = pytest.mark.thorough  # trains
EXPERIMENT = lab.Experiment(
    dataset="digits", model=lab.MLP((16,)), clients=12, rounds=3, seed=3, local=lab.Local(iterations=4),
    faults=[lab.scaling(nodes=["c1"], factor=5.0, since=1)],
)  # fmt: skip


def recorded(level):
    store = MemoryStore()
    with fv.Monitor(None, privacy=level, detectors=(), sinks=[store], strict=True) as monitor:
        lab.run(EXPERIMENT, monitor, engine="sequential")
    run = monitor.run.id
    return Recording.of(store.history(run), sorted(store.memory(run).metrics))


@pytest.fixture(scope="module")
def full():
    return recorded(3)


def of_clients(recording):
    """What is there of any client: metrics, and families."""
    clients = [node for node in recording.names if node.startswith("c")]
    metrics = {name for name in recording.metrics for node in clients if recording.series(name, node)[0]}
    families = {name for name in recording.families if set(recording.across(name, (), 1)[0]) & set(clients)}
    return metrics, families


@pytest.mark.parametrize("level", [1, 2])
def test_nothing_is_left_that_the_monitor_would_not_have_released(full, level):
    metrics, families = of_clients(at_level(full, level))
    expected, expected_families = of_clients(recorded(level))
    assert metrics == expected - set(COMPARED)
    assert families == expected_families
    assert all(is_update_metric(name) or level_of_metric(name) <= level for name in metrics)
    assert all(map(is_update_family, families))
    names = {event.name for event in at_level(full, level).events()}
    assert "labels" in {event.name for event in full.events()}
    assert "labels" not in names


def test_what_is_left_is_as_it_was_and_the_original_too(full):
    before = full.latest("fit.loss_before", 1)
    lower = at_level(full, 2)
    assert lower.latest("fit.loss_before", 1) == before
    np.testing.assert_array_equal(lower.families["update"], full.families["update"])
    assert at_level(full, 1).latest("fit.loss_before", 1) == {}
    assert full.latest("fit.loss_before", 1) == before
    assert full.latest("update.differs", 1)["c1"] > 0
    assert "c1" not in lower.latest("update.differs", 1)


def test_a_mean_over_clients_needs_enough_of_them(full):
    loss = at_level(full, 1).series("fit.loss_before", None)[1]
    assert len(loss) == len(full.series("fit.loss_before", None)[1])
    few = Recording.of(full, ["fit.loss_before"])
    few.metrics["fit.loss_before"][:, 5:] = np.float32(-3e38)
    assert all(map(math.isfinite, few.series("fit.loss_before", None)[1]))
    assert at_level(few, 1).series("fit.loss_before", None) == ([], [])
