# SPDX-License-Identifier: Apache-2.0
"""Below privacy level 3 a client compares its data with its own past by itself, and sends the kind and the amount."""

import numpy as np
import pytest
import torch

from fedvitals.diagnosis.evidence.described_data import DataSketches
from fedvitals.diagnosis.evidence.suspect_data import judge_data
from fedvitals.probes.data_watch import DataWatch
from fedvitals.records import Event, Where
from fedvitals.transport.privacy import PrivacyPolicy, released

CLASSES = 5


def data(seed=0, count=100):
    stream = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(CLASSES, 12)) * 1.5
    y = stream.integers(0, CLASSES, count)
    return torch.tensor(centres[y] + stream.normal(size=(count, 12)) + 3.0).float(), torch.tensor(y)


def flip(x, y):
    return x, torch.where(y == 1, 3, y)


def noise(x, y):
    return x, torch.where(torch.arange(len(y)) % 2 == 0, (y + 1 + torch.arange(len(y)) // 2 % 4) % CLASSES, y)


def sensor(x, y):
    return x + 3 * torch.randn(x.shape, generator=torch.manual_seed(5)), y


def percent(x, y):
    return x * 100, y


def released_events(watch, own, round_index):
    """What leaves the client at level 2 in a round, as events."""
    remark = watch.look("c0", own)
    if remark is None:
        return []
    event = Event(Where("run", round_index, "c0"), float(round_index), "info", *remark[1])
    return [released(event, PrivacyPolicy(2))]


@pytest.mark.parametrize(
    ("change", "kind"),
    [(flip, "label_flip"), (noise, "label_noise"), (sensor, "input_noise"), (percent, "input_scale")],
)
def test_a_client_sends_what_changed_and_neither_means_nor_labels(change, kind):
    watch, sketches, own = DataWatch(), DataSketches(), data()
    sketches.update([*released_events(watch, own, 0), *released_events(watch, own, 1)])
    changed = change(*own)
    (event,) = released_events(watch, changed, 5)
    assert not {"means", "covariance", "classes", "counts", "inputs", "labels", "min", "max"} & {*event.data}
    sketches.update([event])
    suspect = judge_data(sketches, ["c0"], {}).suspects["c0"]
    assert (suspect.kind, suspect.since, suspect.change.pair) == (kind, 5, None)
    released_events(watch, changed, 6)
    sketches.update(released_events(watch, own, 7))  # cured
    assert sketches.change("c0") is None


def test_classes_that_vanish_are_counted_and_not_named():
    watch, (x, y) = DataWatch(), data()
    for round_index in (0, 1):
        released_events(watch, (x, y), round_index)
    rest = (x[y > 1], y[y > 1])
    (event,) = released_events(watch, rest, 2)
    assert event.data["classes_lost"] == 2
    assert event.data["change"] == "none"  # other samples: nothing was relabelled


def test_a_process_that_meets_a_client_later_does_not_clear_it():
    sketches, own = DataSketches(), data()
    watch = DataWatch()
    sketches.update(
        [*released_events(watch, own, 0), *released_events(watch, own, 1), *released_events(watch, flip(*own), 5)]
    )
    sketches.update(released_events(DataWatch(), flip(*own), 6))
    assert sketches.change("c0").kind == "label_flip"


@pytest.mark.parametrize("junk", [{"change": 7}, {"change": "sign_flip"}, {"moved": "x"}, {"classes_lost": "many"}])
def test_words_that_nobody_of_us_sends_accuse_nobody(junk):
    watch, own = DataWatch(), data()
    (event,) = released_events(watch, own, 0)
    sketches = DataSketches()
    sketches.update([Event(event.where, 1.0, "info", "data", "", {**event.data, **junk})])
    assert judge_data(sketches, [*sketches.newest], {}).suspects == {}
