# SPDX-License-Identifier: Apache-2.0
"""When a client's own samples are described again."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fedvitals.probes import data_watch
from fedvitals.probes.data_watch import CHECK_ROUNDS, DataWatch
from fedvitals.probes.fit import labels_of

STREAM = torch.Generator().manual_seed(0)


def samples(count=40):
    return torch.randn(count, 8, 8, generator=STREAM), torch.arange(count) % 4


def test_the_same_tensors_are_looked_at_once(monkeypatch):
    x, y = samples()
    watch, data = DataWatch(), TensorDataset(x, y)
    assert watch.look("c0", data) is not None
    monkeypatch.setattr(data_watch, "checksum", lambda _: pytest.fail("the same objects need no checksum"))
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
    assert data.reads == data_watch.MOST_OF_OTHERS + 2 * data_watch.CHECKED


def test_a_few_samples_that_change_are_noticed_in_the_end():
    data, watch = Slow(), DataWatch()
    watch.look("c0", data)
    data.y[57:60] = 3  # two of the described samples, and none of those that are looked at first
    told = [watch.look("c0", data) is not None for _ in range(CHECK_ROUNDS * 128 // data_watch.CHECKED + 1)]
    assert sum(told) == 1


def test_a_new_data_set_is_looked_at_at_once_and_one_for_each_round_is_not():
    watch, first, second = DataWatch(), Slow(), Slow()
    told = [watch.look("c0", DataLoader(data, 8)) is not None for data in (first, first, second, second)]
    assert told == [True, False, True, False]
    watch, data = DataWatch(), [Slow() for _ in range(CHECK_ROUNDS)]
    for own in data:
        watch.look("c0", own)
    assert [own.reads for own in data] == [data_watch.MOST_OF_OTHERS, 0, 0, 0, 0]
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


def test_one_value_in_a_thousand_samples_of_a_new_tensor_is_noticed():
    """Eight samples are compared, and of these none has changed."""
    x, y, watch = torch.randn(1000, 6), torch.randint(0, 3, (1000,)), DataWatch()
    assert watch.look("c0", (x, y)) is not None
    assert watch.look("c0", (x.clone(), y.clone())) is None
    broken = x.clone()
    broken[1, 2] = torch.nan
    report = watch.look("c0", (broken, y.clone()))
    assert report is not None
    assert report[0]["data.missing"] > 0
