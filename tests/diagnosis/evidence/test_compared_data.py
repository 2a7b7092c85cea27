# SPDX-License-Identifier: Apache-2.0
"""Clients' data against those of their peers and against their own, with data made by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedvitals.data_change import change_of_data, read_sketch
from fedvitals.diagnosis.evidence.compared_data import compare_data
from fedvitals.diagnosis.evidence.described_data import DataSketches
from fedvitals.diagnosis.evidence.suspect_data import _flip_limit, _kind_of
from fedvitals.probes.data_sketch import describe
from fedvitals.records import Event, Where

CLASSES = 5


def client(seed, change=lambda x, y: (x, y), count=100):
    stream = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(CLASSES, 12)) * 1.5
    y = stream.integers(0, CLASSES, count)
    x = centres[y] + stream.normal(size=(count, 12)) + 3.0
    return change(x, y)


def event(x, y, node="c0", round_index=0, looks=0):
    description = describe(torch.tensor(np.asarray(x, np.float32)), torch.tensor(y), len(y))
    name, text, data = description.remark(looks)
    return Event(Where("run", round_index, node), float(round_index), "info", name, text, data)


def sketch(x, y, **place):
    return read(event(x, y, **place))


def read(event):
    return read_sketch(event.where.round, event.data)


def cohort(**changes):
    return {f"c{i}": sketch(*client(i, changes.get(f"c{i}", lambda x, y: (x, y)))) for i in range(10)}


def flip(x, y):
    return x, np.where(y == 1, 3, y)


def noise(x, y):
    return x, np.where(np.arange(len(y)) % 2 == 0, (y + 1 + np.arange(len(y)) // 2 % 4) % CLASSES, y)


def sensor(x, y):
    return x + np.random.default_rng(5).normal(size=x.shape) * 3, y


def percent(x, y):
    return x * 100, y


def camera(x, y):
    return x * 0.6 + 0.2, y


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (flip, "label_flip"),
        (noise, "label_noise"),
        (sensor, "input_noise"),
        (percent, "input_scale"),
        (camera, "inputs"),
    ],
)
def test_a_client_with_wrong_data_is_named_and_nobody_else(change, kind):
    kinds = {node: _kind_of(own) for node, own in compare_data(cohort(c4=change)).items()}
    assert kinds.pop("c4") == kind
    assert {*kinds.values()} == {None}


def test_the_pair_and_the_shares_are_estimated():
    deviation = compare_data(cohort(c4=flip))["c4"]
    assert deviation.pair == (3, 1)
    assert deviation.share == pytest.approx(0.5, abs=0.15)
    assert compare_data(cohort(c4=noise))["c4"].rate == pytest.approx(0.55, abs=0.2)


@pytest.mark.parametrize("clients", [3, 4, 10])
def test_one_liar_frames_nobody(clients):
    """It claims to have most samples of all classes, and that they lie elsewhere."""
    sketches = dict([*cohort().items()][10 - clients :])
    means = np.roll(sketches["c9"].means, 1, axis=0) * 5
    sketches["c9"] = replace(sketches["c9"], counts=np.full(CLASSES, 1e9), means=means, freedom=10**9)
    kinds = {node: _kind_of(own) for node, own in compare_data(sketches).items() if node != "c9"}
    assert {*kinds.values()} == {None}


def skewed_noise(x, y):
    """Half of the labels are guessed, of a client that has hardly any samples of three classes."""
    kept = (y < 2) | (np.arange(len(y)) % 12 == 0)
    x, y = x[kept], y[kept]
    return x, np.where(np.arange(len(y)) % 2 == 0, (y + 1 + np.arange(len(y)) // 2 % 4) % CLASSES, y)


def test_wrong_labels_are_named_where_their_share_differs_by_class():
    """Its rare labels are nearly all wrong, the others half: one share for all explains less than half of it."""
    deviation = compare_data(cohort(c4=skewed_noise))["c4"]
    assert _kind_of(deviation) == "label_noise"
    assert deviation.mixed > deviation.noise


@pytest.mark.parametrize("change", [flip, noise, percent])
def test_two_peers_that_agree_are_enough(change):
    three = dict([*cohort(c1=change).items()][:3])
    kinds = {node: _kind_of(own) for node, own in compare_data(three).items()}
    assert kinds.pop("c1") is not None
    assert {*kinds.values()} == {None}


def test_a_flip_of_few_samples_needs_more_and_so_does_one_of_many_pairs():
    own = compare_data(cohort(c4=flip))["c4"]
    assert _kind_of(own) == "label_flip"
    at_limit = replace(own, flip=_flip_limit(own) + 0.1, mixed=0.0, noise=0.0, excess=0.0)
    assert _kind_of(at_limit) == "label_flip"
    assert _kind_of(replace(at_limit, flipped=at_limit.flipped / 8)) is None
    assert _kind_of(replace(at_limit, pairs=50_000)) is None
    assert _kind_of(replace(at_limit, flipped_share=0.01)) is None


def test_too_few_clients_are_not_compared():
    assert compare_data(dict([*cohort(c1=flip).items()][:2])) == {}


def test_of_scalars_alone_the_spread_is_compared():
    scalars = {
        node: replace(own, classes=(), means=np.zeros((0, 0)), covariance=np.zeros((0, 0)), labelled=False)
        for node, own in cohort(c4=percent).items()
    }
    kinds = {node: _kind_of(own) for node, own in compare_data(scalars).items()}
    assert kinds.pop("c4") == "input_scale"
    assert {*kinds.values()} == {None}


# -- own past ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (flip, "label_flip"),
        (noise, "label_noise"),
        (sensor, "input_noise"),
        (percent, "input_scale"),
        (camera, "inputs"),
    ],
)
def test_what_changed_is_told(change, kind):
    before = client(0)
    told = change_of_data(sketch(*before), sketch(*change(*before), round_index=4))
    assert (told.kind, told.since) == (kind, 4)
    assert told.pair == ((1, 3) if change is flip else None)


@pytest.mark.parametrize(("rates", "kind"), [((0.0, 0.6), "label_flip"), ((0.6, 0.6), "label_noise")])
@pytest.mark.parametrize("seed", range(5))
def test_of_two_classes_random_labels_are_not_a_flip(rates, kind, seed):
    """The counts say of both that one class lost samples to the other."""
    stream = np.random.default_rng(seed)
    y = (stream.random(120) < 0.65).astype(int)
    x = stream.normal(size=(120, 12)) + 1.2 * y[:, None]
    wrong = np.where(stream.random(120) < np.array(rates)[y], 1 - y, y)
    told = change_of_data(sketch(x, y), sketch(x, wrong, round_index=4))
    assert told.kind == kind
    assert 0 < told.moved <= float((wrong != y).mean())


def test_a_little_more_light_is_no_fault():
    x, y = client(0)
    assert change_of_data(sketch(x, y), sketch(x * 1.3, y)) is None


def test_new_samples_are_no_fault():
    assert change_of_data(sketch(*client(0)), sketch(*client(1))) is None
    assert change_of_data(sketch(*client(0)), sketch(*client(0, count=120))) is None


def test_data_that_are_restored_are_well_again():
    sketches = DataSketches()
    well, wrong = client(0), flip(*client(0))
    sketches.update([event(*well)])
    sketches.update([event(*well), event(*wrong, round_index=4, looks=3)])
    assert sketches.change("c0").kind == "label_flip"
    sketches.update([event(*well, round_index=8, looks=3)])
    assert sketches.change("c0") is None


def test_data_that_differ_at_each_look_are_not_compared_with_their_past():
    sketches = DataSketches()
    sketches.update([event(*client(0)), event(*flip(*client(0)), round_index=1, looks=0)])
    assert sketches.change("c0") is None


# -- hostile ----------------------------------------------------------------------------------------------------------

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(sorted(event(*client(0)).data)), junk))
def test_whatever_a_client_sends_is_read_or_left_out(changes):
    good = event(*client(0))
    own = read(replace(good, data={**good.data, **changes}))
    compare_data({**cohort(), **({} if own is None else {"liar": own})})


def test_a_sketch_of_many_classes_is_left_out():
    good = event(*client(0))
    assert read(replace(good, data={**good.data, "classes": list(range(10**5))})) is None
    assert read(replace(good, data={**good.data, "covariance": [0.0] * 10**5})) is None


IMPOSSIBLE = {
    "more freedom than samples": {"freedom": 1e308},
    "more samples of its classes than of all": {"counts": [1e308] * CLASSES},
    "no number of samples": {"samples": -1},
    "means of no input": {"means": [[1e154] * 12] * CLASSES},
    "covariances without variances": {"covariance": [1e300 if i else 1.0 for i in range(78)]},
    "negative variances": {"covariance": [-1.0] * 78},
    "classes wider than everything": {"spreads": [1e12] * CLASSES},
    "a label of 300 digits": {"classes": [10**300, *range(1, CLASSES)]},
    "a checksum that is none": {"inputs": [1]},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_no_samples_are_like_is_left_out(name):
    good = event(*client(0))
    assert read(good) is not None
    assert read(replace(good, data={**good.data, **IMPOSSIBLE[name]})) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"change": "label_noise", "moved": 1e308},
        {"change": "input_noise", "moved": float("inf")},
        {"change": "none", "classes_lost": 1e308},
        {"change": "none", "classes_lost": -1},
    ],
)
def test_a_change_that_no_data_have_is_left_out(changes):
    assert read_sketch(0, {"samples": 4, **changes}) is None


ODD = {
    "large": lambda x, y: (np.full_like(x, 3e38) * np.sign(x), y),
    "small": lambda x, y: (x * 1e-38, y),
    "constant": lambda x, y: (np.ones_like(x), y),
    "without numbers": lambda x, y: (np.full_like(x, np.nan), y),
    "partly without numbers": lambda x, y: (np.where(x > 0, x, np.inf), y),
    "of a class each": lambda x, y: (x, np.arange(len(y))),
    "of hardly any samples": lambda x, y: (x[:4], y[:4]),
    "of equal features": lambda x, y: (np.repeat(x[:, :1], 40, axis=1), y),
    "of features of all sizes": lambda x, y: (x * 10.0 ** np.arange(-12, 12, 2), y),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_data_are_described_by_what_can_be_read(name):
    assert sketch(*client(0, ODD[name])) is not None


@pytest.mark.parametrize("far", [10.0, 1e3, 1e20])
@pytest.mark.parametrize("samples", [100, 1 << 39])
def test_means_far_from_all_others_hide_no_wrong_labels(far, samples):
    described = {**cohort(c3=flip)}
    good = event(*client(0)).data
    means = (np.array(good["means"]) + far).tolist()
    count = samples // CLASSES
    lies = {"samples": samples, "counts": [count] * CLASSES, "freedom": samples - CLASSES, "means": means}
    described["c0"] = read_sketch(0, {**good, **lies})
    kinds = {node: _kind_of(own) for node, own in compare_data(described).items() if node != "c0"}
    assert kinds.pop("c3") == "label_flip"
    assert {*kinds.values()} == {None}
