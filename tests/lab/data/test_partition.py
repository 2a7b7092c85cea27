# SPDX-License-Identifier: Apache-2.0
"""Partitions: every sample once, nobody without, groups whole, and a picture that leaves nobody out."""

import hashlib
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedvitals.errors import ConfigError
from fedvitals.lab.data import partition as p
from fedvitals.lab.data.arrays import Arrays
from fedvitals.lab.data.datasets import load
from fedvitals.lab.data.partition_picture import LINES, SHADES, partition_heat_map
from fedvitals.lab.data.small import Synthetic
from fedvitals.lab.streams import stream
from support.conditions import holds_for_each

DIGESTS = {
    "IID": "4e9a394f1124",
    "Dirichlet": "5c1f92a9e247",
    "QuantitySkew": "27793c6358e8",
    "FeatureShift": "83703c55cc8d",
}


def dataset(labels, groups=None, shape=(1, 2, 2)):
    y = torch.as_tensor(labels)
    x = torch.arange(len(y) * math.prod(shape)).remainder(251).to(torch.uint8).view(-1, *shape)
    return load(Arrays(x, y, x[:1], y[:1], groups=groups, name="little"))


PARTS = st.one_of(
    st.just(p.IID()),
    st.builds(p.Dirichlet, st.floats(1e-4, 100)),
    st.builds(p.Dirichlet, st.floats(1e-4, 100), st.floats(0, 10)),
    st.builds(p.ClassesPerClient, st.integers(1, 4)),
    st.builds(p.QuantitySkew, st.floats(0, 10)),
    st.builds(p.FeatureShift, st.floats(0, 1), st.floats(0, 180)),
    st.builds(p.PermutedLabels, st.integers(2, 3)),
    st.just(p.Natural()),
)
LEAVING_OUT = (p.GroupPerClient,)  # whose rule is not to use every sample


def test_the_property_covers_every_partition():
    assert {type(partition) for partition in (p.IID(), p.Dirichlet(), p.ClassesPerClient(), p.QuantitySkew(),
            p.FeatureShift(), p.PermutedLabels(), p.Natural())} == set(p.PARTITIONS) - set(LEAVING_OUT)  # fmt: skip


@given(
    partition=PARTS,
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=120),
    clients=st.integers(1, 12),
    share=st.floats(0, 0.9),
    least=st.integers(1, 3),
    seed=st.integers(0, 10),
)
@example(p.Dirichlet(1e-4), [0] * 24, 12, 0.2, 1, 0)
@example(p.QuantitySkew(10.0), list(range(6)) * 4, 12, 0.5, 1, 0)
def test_every_sample_is_used_exactly_once(partition, labels, clients, share, least, seed):
    data = dataset(labels, groups=[index // 3 for index in range(len(labels))])
    need = next(n for n in range(1, 100) if n - min(round(n * share), n - 1) >= least)
    if clients * need > len(labels):
        with pytest.raises(ConfigError, match="too few for"):
            p.deal(partition, data, clients, stream(seed, "p"), share, least)
        return
    try:
        shards = p.deal(partition, data, clients, stream(seed, "p"), share, least)
    except ConfigError:  # their own bounds are tested below
        assert isinstance(partition, p.ClassesPerClient | p.PermutedLabels | p.Natural)  # the others have none
        return
    assert len(shards) == clients
    everything = torch.cat([torch.cat([shard.train, shard.test]) for shard in shards])
    assert everything.sort().values.tolist() == list(range(len(labels)))
    assert holds_for_each(len(shard.train) >= least for shard in shards)
    assert holds_for_each(shard.train.dtype == shard.test.dtype == torch.int64 for shard in shards)
    again = p.deal(partition, data, clients, stream(seed, "p"), share, least)
    assert holds_for_each(
        torch.equal(a.train, b.train) and torch.equal(a.test, b.test) for a, b in zip(shards, again, strict=True)
    )


@given(size=st.integers(10, 200), clients=st.integers(1, 10))
def test_equal_dealing_is_equal(size, clients):
    for partition in (p.IID(), p.FeatureShift()):
        sizes = [len(s.train) + len(s.test) for s in p.deal(partition, dataset([0] * size), clients, stream(0, "p"))]
        assert max(sizes) - min(sizes) <= 1


@given(classes=st.integers(1, 5), clients=st.integers(5, 20), seed=st.integers(0, 20))
def test_classes_per_client_are_exactly_so_many(classes, clients, seed):
    data = dataset([label for label in range(5) for _ in range(40 + 10 * label)])
    counts = p.label_counts(p.deal(p.ClassesPerClient(classes), data, clients, stream(seed, "p")), data.y, 5)
    assert ((counts > 0).sum(1) == classes).all()


@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=6), clients=st.integers(1, 40), seed=st.integers(0, 5))
def test_one_class_per_client_is_possible_whenever_each_class_has_a_holder(counts, clients, seed):
    data = dataset([label for label, count in enumerate(counts) for _ in range(count)])
    if not len(counts) <= clients <= sum(min(count, clients) for count in counts):
        with pytest.raises(ConfigError):
            p.deal(p.ClassesPerClient(1), data, clients, stream(seed, "p"))
        return
    held = p.label_counts(p.deal(p.ClassesPerClient(1), data, clients, stream(seed, "p")), data.y, len(counts))
    assert ((held > 0).sum(1) == 1).all()
    assert ((held > 0).sum(0) >= 1).all()


def test_classes_per_client_says_what_is_impossible():
    data = dataset(list(range(10)) * 3)
    with pytest.raises(ConfigError, match="at least 5 clients"):
        p.deal(p.ClassesPerClient(2), data, 4, stream(0, "p"))
    with pytest.raises(ConfigError, match="there are 10 classes"):
        p.deal(p.ClassesPerClient(11), data, 4, stream(0, "p"))
    with pytest.raises(ConfigError, match="too few samples"):
        p.deal(p.ClassesPerClient(4), data, 10, stream(0, "p"))


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=40), clients=st.integers(1, 8), seed=st.integers(0, 20))
def test_groups_are_never_split(sizes, clients, seed):
    groups = [number * 100 + 7 for number, size in enumerate(sizes) for _ in range(size)]
    data = dataset([0] * len(groups), groups)
    try:
        shards = p.deal(p.Natural(), data, clients, stream(seed, "p"))
    except ConfigError:
        assert len(sizes) < clients or len(groups) < clients
        return
    owners = {}
    for client, shard in enumerate(shards):
        for part in ("train", "test"):
            for index in getattr(shard, part).tolist():
                assert owners.setdefault(groups[index], (client, part)) == (client, part)


def test_natural_shares_out_evenly_and_needs_groups():
    groups = [number for number in range(120) for _ in range(30)]
    shards = p.deal(p.Natural(), dataset([0] * 3600, groups), 10, stream(0, "p"))
    assert {len(s.train) + len(s.test) for s in shards} == {360}
    assert holds_for_each(len(s.test) in {60, 90} for s in shards)  # 72 would be a fifth
    with pytest.raises(ConfigError, match="no groups"):
        p.deal(p.Natural(), dataset([0] * 10), 2, stream(0, "p"))


def skew(partition, clients=20):
    """How far the clients' label shares lie from those of the whole: 0 to 1."""
    data = dataset(list(range(10)) * 200)
    counts = p.label_counts(p.deal(partition, data, clients, stream(1, "p"), least=5), data.y, 10).double()
    return float(((counts / counts.sum(1, keepdim=True)) - 0.1).abs().sum(1).mean() / 2)


def test_a_smaller_alpha_skews_more():
    skews = [skew(p.Dirichlet(alpha)) for alpha in (100, 1.0, 0.3, 0.1)]
    assert skews == sorted(skews)
    assert skews[0] < 0.15
    assert skews[-1] > 0.6
    assert skew(p.IID()) < 0.15


def test_sigma_skews_sizes_not_labels():
    data = dataset(list(range(10)) * 400)

    def sizes(sigma):
        return sorted(len(s.train) for s in p.deal(p.QuantitySkew(sigma), data, 20, stream(3, "p")))

    assert sizes(0)[-1] - sizes(0)[0] <= 1
    assert 3 < sizes(1.0)[-1] / sizes(1.0)[0] < sizes(2.0)[-1] / sizes(2.0)[0]


def test_dirichlet_with_sigma_skews_sizes_as_drawn_and_labels_as_before():
    data, clients = dataset(list(range(10)) * 400), 20
    factors = torch.randn(clients, generator=stream(3, "p"), dtype=torch.float64).exp()  # the stream's first numbers
    counts = p.label_counts(p.deal(p.Dirichlet(1e9, 1.0), data, clients, stream(3, "p")), data.y, 10)
    assert (counts - 400 * factors[:, None] / factors.sum()).abs().max() <= 1  # α so large: no label skew
    assert skew(p.Dirichlet(0.1, 1.0)) > 0.6

    def spread(sigma):
        shards = p.deal(p.Dirichlet(1.0, sigma), data, clients, stream(3, "p"))
        return float(torch.tensor([float(len(s.train)) for s in shards]).log().std())

    assert spread(0.0) < spread(1.0) < spread(2.0)


@given(groups=st.integers(2, 6), clients=st.integers(6, 12), seed=st.integers(0, 20))
def test_groups_permute_labels_consistently_and_the_inverse_gives_them_back(groups, clients, seed):
    data = dataset(list(range(5)) * 20)
    shards = p.deal(p.PermutedLabels(groups), data, clients, stream(seed, "p"))
    plain = p.deal(p.IID(), data, clients, stream(seed, "p"))
    names = [tuple(range(5)) if s.relabel is None else tuple(s.relabel.tolist()) for s in shards]
    assert names[0] == tuple(range(5))
    assert len(set(names[:groups])) == groups
    assert names == [names[place % groups] for place in range(clients)]
    for shard, as_dealt, name in zip(shards, plain, names, strict=True):
        assert sorted(name) == list(range(5))
        inverse = torch.tensor(name).argsort()
        for part in ("train", "test"):
            (x, y), (x_plain, y_plain) = (p.shard_tensors(data, s, part) for s in (shard, as_dealt))
            assert torch.equal(x, x_plain)
            assert [name[label] for label in y_plain.tolist()] == y.tolist()
            assert torch.equal(inverse[y], y_plain)
        counts, before = (p.label_counts([s], data.y, 5)[0] for s in (shard, as_dealt))
        assert torch.equal(counts[list(name)], before)


def test_more_groups_than_clients_or_orders():
    with pytest.raises(ConfigError, match="number of clients, 4"):
        p.deal(p.PermutedLabels(5), dataset(list(range(10)) * 3), 4, stream(0, "p"))
    with pytest.raises(ConfigError, match="at most 2"):
        p.deal(p.PermutedLabels(3), dataset([0, 1] * 10), 4, stream(0, "p"))


def test_dealing_gives_the_shards_that_it_always_gave():
    """Digests of the shards of 2026-11; a change here is a change of every stored experiment."""
    digests = {}
    for partition in (p.IID(), p.Dirichlet(0.3), p.QuantitySkew(1.0), p.FeatureShift(0.5, 30)):
        digest = hashlib.blake2b(digest_size=6)
        for shard in p.deal(partition, load("digits"), 10, stream(7, "partition")):
            digest.update(shard.train.numpy().tobytes() + shard.test.numpy().tobytes())
            digest.update(repr((shard.brightness, shard.rotation)).encode())
        digests[type(partition).__name__] = digest.hexdigest()
    assert digests == DIGESTS


def test_more_clients_than_samples():
    with pytest.raises(ConfigError, match=r"too few for 11 clients.*at most 10 clients"):
        p.deal(p.IID(), dataset([0] * 10), 11, stream(0, "p"))
    with pytest.raises(ConfigError, match="at least 1"):
        p.deal(p.IID(), dataset([0] * 10), 0, stream(0, "p"))
    with pytest.raises(ConfigError, match="below 1"):
        p.deal(p.IID(), dataset([0] * 10), 2, stream(0, "p"), test_share=1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: p.Dirichlet(0), lambda: p.Dirichlet(math.inf), lambda: p.ClassesPerClient(0),
        lambda: p.Dirichlet(1, -1), lambda: p.PermutedLabels(1),
        lambda: p.QuantitySkew(-1), lambda: p.FeatureShift(brightness=2), lambda: p.FeatureShift(rotation=181),
    ],
)  # fmt: skip
def test_impossible_values_are_refused(wrong):
    with pytest.raises(ConfigError, match="must be"):
        wrong()


def test_shards_become_tensors():
    data = dataset([0, 1, 2, 0, 1, 2])
    shard = p.Shard(torch.tensor([1, 4]), torch.tensor([0]))
    x, y = p.shard_tensors(data, shard)
    assert x.dtype == torch.float32
    assert torch.equal(x, data.x[[1, 4]].float() / 255)
    assert y.tolist() == [1, 1]
    assert p.shard_tensors(data, shard, "test")[1].tolist() == [0]


def test_brightness_ends_at_white_and_leaves_the_data_set():
    data = dataset([0, 1], shape=(1, 12, 12))
    before = data.x.clone()
    plain, _ = p.shard_tensors(data, p.Shard(torch.tensor([0, 1]), torch.tensor([])))
    bright, _ = p.shard_tensors(data, p.Shard(torch.tensor([0, 1]), torch.tensor([]), brightness=1.5))
    assert torch.equal(bright, (plain * 1.5).clamp(max=1))
    assert float(bright.max()) == 1
    assert torch.equal(data.x, before)


@pytest.mark.parametrize("quarters", [1, 2, -1])
def test_rotation_against_the_clock(quarters):
    data = dataset([0, 1], shape=(3, 8, 8))
    plain, _ = p.shard_tensors(data, p.Shard(torch.tensor([0, 1]), torch.tensor([])))
    turned, _ = p.shard_tensors(data, p.Shard(torch.tensor([0, 1]), torch.tensor([]), rotation=90.0 * quarters))
    torch.testing.assert_close(turned, torch.rot90(plain, quarters, (2, 3)), atol=1e-5, rtol=0)


def test_an_oblong_image_is_turned_not_sheared():
    data = dataset([0], shape=(1, 6, 10))
    plain, _ = p.shard_tensors(data, p.Shard(torch.tensor([0]), torch.tensor([])))
    turned, _ = p.shard_tensors(data, p.Shard(torch.tensor([0]), torch.tensor([]), rotation=180.0))
    torch.testing.assert_close(turned, plain.flip(2, 3), atol=1e-5, rtol=0)
    quarter, _ = p.shard_tensors(data, p.Shard(torch.tensor([0]), torch.tensor([]), rotation=90.0))
    middle = torch.rot90(plain, 1, (2, 3))[..., 2:8, :]  # [6, 6]: what of it lies inside the oblong
    torch.testing.assert_close(quarter[..., 2:8], middle, atol=1e-5, rtol=0)


def test_feature_shift_gives_each_client_its_own_camera():
    data = load("digits")
    shards = p.deal(p.FeatureShift(brightness=0.5, rotation=30), data, 10, stream(0, "p"))
    assert len({s.brightness for s in shards}) == len({s.rotation for s in shards}) == 10
    assert holds_for_each(0.5 <= s.brightness <= 1.5 and -30 <= s.rotation <= 30 for s in shards)
    vectors = load(Synthetic(samples=100))
    with pytest.raises(ConfigError, match="Only images"):
        p.deal(p.FeatureShift(rotation=5), vectors, 2, stream(0, "p"))
    tokens = load(Synthetic(samples=100, sequence=3, vocabulary=9))
    with pytest.raises(ConfigError, match="tokens"):
        p.deal(p.FeatureShift(), tokens, 2, stream(0, "p"))


def test_label_counts_by_hand():
    y = torch.tensor([0, 2, 2, 1])
    shards = [p.Shard(torch.tensor([0, 1]), torch.tensor([2])), p.Shard(torch.tensor([3]), torch.tensor([]).long())]
    assert p.label_counts(shards, y, 4).tolist() == [[1, 0, 2, 0], [0, 1, 0, 0]]
    assert p.label_counts(shards, y, 4, "train").tolist() == [[1, 0, 1, 0], [0, 1, 0, 0]]
    assert p.label_counts(shards, y, 4, "test").tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]


def test_the_picture_shows_none_and_most():
    data = dataset([0] * 8 + [1] * 1)
    empty = torch.tensor([]).long()
    shards = [p.Shard(torch.arange(8), empty), p.Shard(torch.tensor([8]), empty)]
    assert partition_heat_map(shards, data).splitlines()[2:] == [f"c0 {SHADES[4]}· 8 │ c1 ·{SHADES[1]} 1"]


@pytest.mark.parametrize(("clients", "width"), [(1, 80), (20, 80), (100, 80), (100, 20), (1000, 100)])
def test_the_picture_folds_and_leaves_nobody_out(clients, width):
    data = load(Synthetic(samples=2500))
    drawn = partition_heat_map(p.deal(p.Dirichlet(0.3), data, clients, stream(0, "p")), data, width).splitlines()
    cells = [cell.split() for line in drawn[2:] for cell in line.split("│")]
    assert sum(int(total) for *_, total in cells) == 2000
    assert cells[-1][0].endswith(str(clients - 1)) or any(c[0].endswith(str(clients - 1)) for c in cells)
    assert len(drawn) - 2 <= LINES
    assert max(map(len, drawn[2:])) <= width
