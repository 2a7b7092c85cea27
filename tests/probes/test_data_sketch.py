# SPDX-License-Identifier: Apache-2.0
"""What is told of a client's own samples, and when."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import fedvitals as fv
from fedvitals.probes import data_sketch
from fedvitals.probes.data_sketch import CHECK_ROUNDS, DIMENSIONS, DataWatch, describe
from fedvitals.probes.fit import labels_of
from fedvitals.testing import MemorySink

STREAM = torch.Generator().manual_seed(0)


def samples(count=40, shape=(8, 8), classes=4):
    return torch.randn(count, *shape, generator=STREAM), torch.arange(count) % classes


def test_means_and_covariance_are_those_of_the_projected_samples():
    x, y = samples(60, (5, 10))
    event = describe(x, y, 60).event
    signs = np.random.default_rng(50).integers(0, 2, (50, DIMENSIONS)) * 2.0 - 1
    projected = x.reshape(60, 50).double().numpy() @ signs / np.sqrt(50)
    labels = y.numpy()
    assert event["classes"] == [0, 1, 2, 3]
    assert event["counts"] == [15] * 4
    expected = np.stack([projected[labels == label].mean(0) for label in range(4)])
    np.testing.assert_allclose(event["means"], expected, rtol=2e-3, atol=1e-4)
    residuals = projected - expected[labels]
    covariance = (residuals.T @ residuals / 56)[np.triu_indices(DIMENSIONS)]
    np.testing.assert_allclose(event["covariance"], covariance, rtol=6e-3, atol=1e-4)
    np.testing.assert_allclose(
        event["spreads"], [(residuals[labels == c] ** 2).sum() / 14 for c in range(4)], rtol=2e-3
    )


def test_patches_of_images_are_told_whatever_their_brightness_contrast_and_order_of_axes():
    x, y = samples(60, (3, 12, 12))
    plain, lit, last = (describe(own, y, 60).event for own in (x, 3 * x + 5, x.permute(0, 2, 3, 1)))
    assert np.shape(plain["means"]) == (4, 2 * DIMENSIONS)
    patches, same, permuted = (np.array(own["means"])[:, DIMENSIONS:] for own in (plain, lit, last))
    np.testing.assert_allclose(same, patches, rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(permuted, patches, rtol=2e-3, atol=1e-4)
    swapped = np.array(describe(x.flip(3), y, 60).event["means"])[:, DIMENSIONS:]
    assert not np.allclose(swapped, patches, rtol=0.01)


@pytest.mark.parametrize("shape", [(1, 8, 8), (12, 12), (9, 12, 12)])
def test_what_is_no_image_or_a_tiny_one_has_no_patches(shape):
    x, y = samples(60, shape)
    assert np.shape(describe(x, y, 60).event["means"]) == (4, DIMENSIONS)


def test_few_features_are_told_as_they_are():
    x, y = samples(40, (3,))
    event = describe(x, y, 40).event
    np.testing.assert_allclose(event["means"][0], x[y == 0].mean(0), rtol=2e-3, atol=1e-4)


def test_scalars_are_those_of_all_inputs():
    x, y = samples()
    x[0, 0, 0], x[:, 1, 1] = torch.nan, 2.0
    x[5] = x[4]
    metrics = describe(x, y, 40).metrics
    finite = x[~x.isnan()]
    assert metrics["data.mean"] == pytest.approx(float(finite.mean()), rel=1e-5)
    assert metrics["data.std"] == pytest.approx(float(finite.std(correction=0)), rel=1e-5)
    assert metrics["data.missing"] == pytest.approx(1 / x.numel())
    assert metrics["data.constant"] == pytest.approx(1 / 64)
    assert metrics["data.duplicates"] == pytest.approx(1 / 40)


def test_classes_of_few_samples_are_withheld():
    x, _ = samples(43)
    y = torch.cat([torch.zeros(40), torch.ones(3)]).long()
    assert describe(x, y, 43).event["classes"] == [0]


@pytest.mark.parametrize("labels", [torch.randn(40), torch.randint(0, 2, (40, 3)), None])
def test_targets_that_are_no_classes_make_one_class(labels):
    event = describe(samples()[0], labels, 40).event
    assert not event["labelled"]
    assert event["counts"] == [40]


def test_tokens_are_counted_and_not_taken_for_numbers():
    x = torch.randint(1, 900, (40, 12), generator=STREAM)
    x[:, 6:] = 0
    description = describe(x, torch.arange(40) % 2, 40)
    assert description.event["tokens"]
    assert description.metrics == {"data.length": 6.0, "data.duplicates": 0.0}


def test_too_few_samples_are_not_described():
    assert describe(*samples(3), 3) is None


# -- when -------------------------------------------------------------------------------------------------------------


def test_the_same_tensors_are_looked_at_once(monkeypatch):
    x, y = samples()
    watch, data = DataWatch(), TensorDataset(x, y)
    assert watch.look("c0", data) is not None
    monkeypatch.setattr(data_sketch, "checksum", lambda _: pytest.fail("the same objects need no checksum"))
    assert watch.look("c0", DataLoader(data, 8)) is None


def test_a_change_in_place_and_other_tensors_are_told_and_equal_ones_are_not():
    x, y = samples()
    watch = DataWatch()
    watch.look("c0", (x, y))
    assert watch.look("c0", (x.clone(), y.clone())) is None
    y[3] = 1
    _, (name, _, data) = watch.look("c0", (x, y))
    assert (name, data["looks"]) == ("data", 1)
    assert watch.look("c0", (x * 2, y)) is not None


class Slow(Dataset):
    """Counts its reads; `noise` is drawn anew at each."""

    def __init__(self, noise=0.0):
        self.x, self.y = samples(200)
        self.reads, self.noise = 0, noise

    def __len__(self):
        return len(self.y)

    def __getitem__(self, place):
        self.reads += 1
        return self.x[place] + self.noise * torch.randn(8, 8), self.y[place]


def test_data_that_are_read_one_by_one_are_looked_at_seldom():
    data, watch = Slow(), DataWatch()
    told = [watch.look("c0", data) is not None for _ in range(3 * CHECK_ROUNDS)]
    assert told.index(True) == 0
    assert sum(told) == 1
    assert data.reads == data_sketch.MOST_OF_OTHERS + 2 * data_sketch.CHECKED


def test_a_few_samples_that_change_are_noticed_in_the_end():
    data, watch = Slow(), DataWatch()
    watch.look("c0", data)
    data.y[57:60] = 3  # two of the described samples, and none of those that are looked at first
    told = [watch.look("c0", data) is not None for _ in range(CHECK_ROUNDS * 128 // data_sketch.CHECKED + 1)]
    assert sum(told) == 1


def test_a_new_data_set_is_looked_at_at_once_and_one_for_each_round_is_not():
    watch, first, second = DataWatch(), Slow(), Slow()
    told = [watch.look("c0", DataLoader(data, 8)) is not None for data in (first, first, second, second)]
    assert told == [True, False, True, False]
    watch, data = DataWatch(), [Slow() for _ in range(CHECK_ROUNDS)]
    for own in data:
        watch.look("c0", own)
    assert [own.reads for own in data] == [data_sketch.MOST_OF_OTHERS, 0, 0, 0, 0]
    few = Slow()
    few.x, few.y = few.x[:90], few.y[:90]
    assert watch.look("c0", few)[1][2]["samples"] == 90


def test_rows_of_tensors_are_told_as_tensors_are():
    x, y = samples(200)
    rows = torch.arange(0, 200, 3).tolist()
    part, watch = Subset(TensorDataset(x, y), rows), DataWatch()
    told, plain = watch.look("c0", DataLoader(part, 8)), DataWatch().look("c0", (x[rows], y[rows]))
    assert told == plain
    assert watch.look("c0", part) is None
    y[rows[5]] = (y[rows[5]] + 1) % 4
    assert watch.look("c0", part)[1][2]["change"] == "label_noise"


class Listed(Slow):
    """A data set that has its labels in a list, as torchvision's have."""

    def __init__(self):
        super().__init__()
        self.targets = self.y.tolist()

    def __getitem__(self, place):
        return self.x[place], self.targets[place]


def test_labels_of_data_sets_that_list_them_are_counted_and_all_are_compared():
    data, rows = Listed(), [*range(40)]
    assert labels_of(DataLoader(Subset(data, rows), 8)) == {0: 10, 1: 10, 2: 10, 3: 10}
    watch = DataWatch()
    watch.look("c0", data)
    data.targets[199] = 0  # which is not among the described samples
    assert [watch.look("c0", data) is not None for _ in range(CHECK_ROUNDS)].count(True) == 1
    data.targets = [0] * 200
    data.__class__.__getitem__ = Slow.__getitem__  # what is listed is not what is given
    assert labels_of(data) is None


def test_augmented_data_are_looked_at_less_and_less():
    data, watch = Slow(noise=0.1), DataWatch()
    rounds = [number for number in range(100) if watch.look("c0", data) is not None]
    assert len(rounds) <= 5
    state = torch.get_rng_state()
    DataWatch().look("c0", data)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_may_leave_depends_on_the_privacy_level():
    told = {}
    for level in (1, 2, 3):
        sink = MemorySink()
        x, y = samples()
        with fv.Monitor(None, sinks=[sink], privacy=level, strict=True) as monitor, monitor.round(0):
            model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))
            with monitor.client("c0", model, data=(x, y), loss=torch.nn.functional.cross_entropy):
                pass
        told[level] = {key for event in sink.events("data") for key in event.data}
    assert not told[1]
    assert told[2] == {"samples", "features", "looks", "mean", "std", "std_error", "missing", "constant", "duplicates"}
    assert {"means", "covariance", "inputs", "labels", "min", "max"} <= told[3]
