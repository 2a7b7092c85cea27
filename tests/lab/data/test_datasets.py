# SPDX-License-Identifier: Apache-2.0
"""Data sets: all forms of GTSRB give the same arrays, damage is named, the cache heals, downloads are verified."""

import functools
import hashlib
import http.server
import json
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from fedvitals.errors import ConfigError
from fedvitals.lab.data import cache as data_cache
from fedvitals.lab.data import datasets
from fedvitals.lab.data import gtsrb as data_gtsrb
from fedvitals.lab.data import small as data_small
from fedvitals.lab.data.arrays import Arrays
from fedvitals.lab.data.datasets import dataset_named, load
from fedvitals.lab.data.gtsrb import GTSRB
from fedvitals.lab.data.small import Synthetic
from fedvitals.lab.data.sources import Source, fetch

SHARED = Path.cwd().parent / "shared" / "data"
shared = pytest.mark.skipif(not SHARED.exists(), reason="the shared data sets are not here")


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Nobody's cache but the test's, and no data set but the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDVITALS_DATA", raising=False)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


# -- names, digits, synthetic, the user's own --------------------------------------------------------------------------


NAMES = ("digits", "synthetic", "tabular", "time_series", "text", "gtsrb", "fashion_mnist", "cifar10")


def test_names():
    assert [type(dataset_named(name)) for name in NAMES] == list(datasets.DATASETS)
    assert dataset_named("fashion-mnist") == dataset_named("fashion_mnist")
    with pytest.raises(ConfigError, match="Did you mean 'gtsrb'"):
        dataset_named("gtrsb")


def test_digits():
    digits = load("digits")
    assert digits.x.shape == (1438, 1, 8, 8)
    assert digits.test_x.shape == (359, 1, 8, 8)
    assert (float(digits.x.min()), float(digits.x.max()), digits.x.dtype) == (0, 1, torch.float32)
    assert (digits.classes, digits.name, digits.shape, digits.groups) == (10, "digits", (1, 8, 8), None)
    assert load("digits").digest == digits.digest == "2a8801cc65e0a19a0805a280f1d54571892f109af56a67c3f05b1e4fbb461d27"
    read, imported = data_small.Digits().make(), load_digits()
    assert np.array_equal(read.x[:, 0] * 16, imported.images)
    assert np.array_equal(read.y, imported.target)
    assert np.array_equal(data_small._digits_by_import()[:, 64], read.y)
    everything = torch.cat([digits.x, digits.test_x]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797  # nothing is in both, nothing is lost


def nearest_mean_accuracy(data):
    means = torch.stack([data.x[data.y == label].flatten(1).mean(0) for label in range(data.classes)])
    guessed = torch.cdist(data.test_x.flatten(1), means).argmin(1)
    return float((guessed == data.test_y).float().mean())


def test_synthetic_is_as_hard_as_is_wanted():
    found = [nearest_mean_accuracy(load(Synthetic(separation=far))) for far in (0.0, 2.0, 4.0, 8.0)]
    assert found[0] < 0.2
    assert found[1] < found[2] - 0.1
    assert found[3] > 0.99
    assert load(Synthetic(seed=1)).digest != load(Synthetic()).digest == load(Synthetic()).digest


def test_synthetic_sequences_and_tokens():
    sequences = load(Synthetic(samples=200, sequence=6, features=4, classes=3))
    assert sequences.x.shape == (160, 6, 4)
    tokens = load(Synthetic(samples=200, sequence=6, vocabulary=50, classes=3))
    assert (tokens.x.dtype, tokens.shape, tokens.inputs(tokens.x).dtype) == (torch.int64, (6,), torch.int64)
    assert tokens.vocabulary <= 50
    shares = [torch.bincount(tokens.x[tokens.y == label].flatten(), minlength=50).argmax() for label in range(3)]
    assert len(set(map(int, shares))) > 1
    for wrong in ({"classes": 1}, {"samples": 20}, {"separation": -1}, {"sequence": 0}, {"vocabulary": 5}):
        with pytest.raises(ConfigError, match="of synthetic"):
            Synthetic(**wrong)


def test_ones_own_arrays():
    x, y = numbers(50, 3, 4, 4), np.arange(50, dtype=np.int32) % 5
    data = load(Arrays(x, y, name="mine"))
    assert (len(data.y), len(data.test_y), data.classes, data.name) == (40, 10, 5, "mine")
    assert torch.equal(data.inputs(data.x), data.x.float() / 255)
    assert data.x.dtype == torch.uint8
    whole = load(Arrays(x.astype(np.float64), y, x[:5].astype(np.float64), y[:5]))
    assert (whole.x.dtype, len(whole.y), len(whole.test_y)) == (torch.float32, 50, 5)
    assert repr(Arrays(x, y)) == repr(Arrays(x.copy(), y)) != repr(Arrays(x + 1, y))


def test_ones_own_groups_are_not_split_into_test():
    groups = np.repeat(np.arange(10), 5)
    x = groups[:, None].astype(np.float32)
    data = load(Arrays(x, groups % 2, groups=groups))
    assert not set(data.x.flatten().tolist()) & set(data.test_x.flatten().tolist())
    assert torch.equal(data.x.flatten().long(), data.groups)
    assert len(data.test_y) == 10


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (Arrays(np.zeros((4, 2)), [0, 1, 2]), "4 of x and 3 of y"),
        (Arrays(np.zeros((3, 2)), [0, 1, -1]), "negative"),
        (Arrays(np.zeros((3, 2)), [0.0, 1.0, 2.0], classes=3), "whole numbers"),
        (Arrays(np.full((3, 2), np.nan), [0, 1, 2]), "NaN"),
        (Arrays(np.zeros(3), [0, 1, 2]), "shape"),
        (Arrays(np.zeros((3, 2)), [0, 1, 2], np.zeros((3, 2))), "Only one of"),
        (Arrays(np.zeros((3, 2)), [0, 1, 2], np.zeros((1, 3)), [0]), "differ"),
        (Arrays(np.array([["a", "b"]] * 3), [0, 1, 2]), "must hold numbers"),
        (Arrays(np.zeros((3, 2)), [0, 1, 2], classes=2), "at least 3"),
        (Arrays(np.zeros((3, 2, 2), np.int64), [0, 1, 2]), "tokens"),
    ],
)
def test_arrays_that_cannot_be_used(arrays, words):
    with pytest.raises(ConfigError, match=words):
        load(arrays)


# -- GTSRB -------------------------------------------------------------------------------------------------------------

HEADER = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"


@pytest.fixture
def official(tmp_path):
    """A small GTSRB as published: two classes, two tracks each, files and lists in no good order."""
    root = tmp_path / "official"
    images, test = root / data_gtsrb.TRAIN, root / data_gtsrb.TEST
    for label in (7, 30):
        folder = images / f"{label:05d}"
        folder.mkdir(parents=True)
        rows = []
        for track in (1, 0):
            for frame in (1, 0, 2):
                name = f"{track:05d}_{frame:05d}.ppm"
                pixels = numbers(40 + frame, 35 + track, 3, seed=label * 100 + track * 10 + frame)
                Image.fromarray(pixels).save(folder / name)
                rows.append(f"{name};{35 + track};{40 + frame};5;5;30;30;{label}")
        (folder / f"GT-{label:05d}.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    test.mkdir(parents=True)
    for index in range(3):
        Image.fromarray(numbers(32, 32, 3, seed=index)).save(test / f"{index:05d}.ppm")
    truth = [f"{index:05d}.ppm;32;32;5;5;30;30;{7 if index else 30}" for index in (2, 0, 1)]
    (root / "GTSRB" / data_gtsrb.TRUTH).write_text("\n".join([HEADER, *truth]) + "\n")
    return root


def zipped(official, folder):
    folder.mkdir()
    content = ((data_gtsrb.TRAIN, data_gtsrb.ZIPS[0]), (data_gtsrb.TEST, data_gtsrb.ZIPS[1]))
    for inside, name in content:
        with zipfile.ZipFile(folder / name, "w") as file:
            for path in (official / inside).rglob("*.*"):
                file.write(path, path.relative_to(official))
    with zipfile.ZipFile(folder / data_gtsrb.ZIPS[2], "w") as file:
        file.write(official / "GTSRB" / data_gtsrb.TRUTH, data_gtsrb.TRUTH)
    return folder


def test_gtsrb_as_published(official):
    data = load("gtsrb", official)
    assert data.x.shape == (12, 3, 32, 32)
    assert data.y.tolist() == [7] * 6 + [30] * 6
    assert data.groups.tolist() == [700] * 3 + [701] * 3 + [3000] * 3 + [3001] * 3
    assert data.test_y.tolist() == [30, 7, 7]
    assert data.classes == 43
    assert data.name == "gtsrb (12 and 3 images of it)"
    with Image.open(official / data_gtsrb.TRAIN / "00030" / "00001_00002.ppm") as image:
        expected = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.array_equal(data.x[-1].numpy(), expected)
    assert np.array_equal(data.test_x[1].numpy(), numbers(32, 32, 3, seed=1).transpose(2, 0, 1))  # 32 × 32 stays
    assert load("gtsrb", official / "GTSRB").digest == data.digest


def test_gtsrb_zipped_is_the_same(official, tmp_path):
    assert load("gtsrb", zipped(official, tmp_path / "zips")).digest == load("gtsrb", official).digest


def test_gtsrb_packed_is_the_same(official, tmp_path):
    data = load("gtsrb", official)
    for name, x, y in zip(data_gtsrb.PACKED, (data.x, data.test_x), (data.y, data.test_y), strict=True):
        pixels = x.numpy().copy()
        pixels[:, 0] -= pixels[:, 1]
        pixels[:, 2] -= pixels[:, 1]
        delta = np.diff(np.diff(pixels, axis=3, prepend=np.uint8(0)), axis=2, prepend=np.uint8(0))
        tracks = {"track": (data.groups % 100).numpy().astype(np.uint16)} if x is data.x else {}
        np.savez_compressed(tmp_path / name, x_delta=delta, y=y.numpy().astype(np.uint8), **tracks)
    assert load("gtsrb", tmp_path).digest == data.digest


def damage_list(root):
    (root / data_gtsrb.TRAIN / "00007" / "GT-00007.csv").write_text(f"{HEADER}\n00000_00000.ppm;1;1;1;1;1;1;8\n")


def damage_image(root):
    (root / data_gtsrb.TRAIN / "00030" / "00000_00000.ppm").write_bytes(b"P6 40 40 255 too short")


def lose_image(root):
    (root / data_gtsrb.TEST / "00001.ppm").unlink()


def lose_truth(root):
    (root / "GTSRB" / data_gtsrb.TRUTH).unlink()


@pytest.mark.parametrize(
    ("hurt", "words"),
    [
        (damage_list, "GT-00007.csv lists 00000_00000.ppm of class 8"),
        (damage_image, "00030/00000_00000.ppm is missing or damaged"),
        (lose_image, "00001.ppm is missing or damaged"),
        (lose_truth, "is not complete: .*GT-final_test.csv is missing"),
    ],
)
def test_a_damaged_gtsrb_is_named(official, hurt, words):
    hurt(official)
    with pytest.raises(ConfigError, match=words):
        load("gtsrb", official)


def test_a_torn_zip_is_named(official, tmp_path):
    folder = zipped(official, tmp_path / "zips")
    whole = (folder / data_gtsrb.ZIPS[0]).read_bytes()
    (folder / data_gtsrb.ZIPS[0]).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="is damaged"):
        load("gtsrb", folder)


@shared
@pytest.mark.thorough
def test_the_shared_gtsrb_is_the_published_one(tmp_path):
    data = load("gtsrb", SHARED)
    assert (data.name, data.digest) == ("gtsrb", data_gtsrb.DIGEST)
    assert (len(data.y), len(data.test_y), len(data.groups.unique())) == (39_209, 12_630, 1_307)
    decoded = data.test_x.permute(0, 2, 3, 1).contiguous().numpy()
    assert (
        hashlib.sha256(decoded.data).hexdigest() == "089c15e28132ebb6ffbf3a933de852fffe8c466f6b195452d43bce99d2075322"
    )
    fewer = load(GTSRB(samples=500, test_samples=100), SHARED)
    assert (len(fewer.y), len(fewer.test_y), len(fewer.groups)) == (500, 100, 500)
    assert fewer.digest != data.digest
    assert torch.equal(load(GTSRB(samples=500), SHARED).x, fewer.x)


# -- where things lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gtsrb", "fashion-mnist", "cifar10"])
def test_a_missing_data_set_is_answered_with_where_and_whence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"Get it from https://.*put .*--data or FEDVITALS_DATA") as caught:
        load(name)
    assert str(tmp_path.parent / "shared" / "data") in str(caught.value)
    with pytest.raises(ConfigError, match="does not exist"):
        load(name, tmp_path / "nowhere")


def test_a_named_folder_is_the_only_one(official, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVITALS_DATA", str(official))
    assert len(load("gtsrb").y) == 12
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="not found"):
        load("gtsrb", tmp_path / "empty")


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(official, tmp_path, monkeypatch):
    """The official folder, loaded once; and a way to count how often it is decoded."""
    decoded = []
    true = data_gtsrb._read_folders
    monkeypatch.setattr(data_gtsrb, "_read_folders", lambda paths: decoded.append(1) or true(paths))
    first = load("gtsrb", official)
    [entry] = (tmp_path / "cache" / "fedvitals" / "arrays").iterdir()
    return first.digest, entry, decoded


def test_the_second_load_comes_from_the_cache(cached, official):
    digest, _, decoded = cached
    again = load("gtsrb", official)
    assert again.digest == digest
    assert decoded == [1]
    again.x.add_(1)  # what is done to the arrays in memory does not reach the files
    assert load("gtsrb", official).digest == digest
    assert decoded == [1]


def tear_array(entry):
    file = next(entry.glob("x-*.npy"))
    file.write_bytes(file.read_bytes()[:-100])


def flip_bit(entry):
    file = next(entry.glob("test_x-*.npy"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def tear_manifest(entry):
    (entry / "manifest.json").write_text((entry / "manifest.json").read_text()[:-9])


def other_version(entry):
    manifest = json.loads((entry / "manifest.json").read_text())
    (entry / "manifest.json").write_text(json.dumps({**manifest, "version": data_cache.VERSION + 1}))


def pickle_instead(entry):
    np.save(next(entry.glob("y-*.npy")), np.asarray([{}], object), allow_pickle=True)


def lose_labels(entry):
    next(entry.glob("test_y-*.npy")).unlink()


@pytest.mark.parametrize("hurt", [tear_array, flip_bit, tear_manifest, other_version, pickle_instead, lose_labels])
def test_a_torn_cache_is_made_anew(cached, official, hurt):
    digest, entry, decoded = cached
    hurt(entry)
    assert load("gtsrb", official).digest == digest
    assert load("gtsrb", official).digest == digest
    assert decoded == [1, 1]
    assert len(list(entry.iterdir())) == 6  # five arrays and the manifest: nothing piles up


def test_a_changed_source_is_read_anew(cached, official):
    digest, _, decoded = cached
    Image.fromarray(numbers(50, 50, 3, seed=99)).save(official / data_gtsrb.TEST / "00000.ppm")
    assert load("gtsrb", official).digest != digest
    assert decoded == [1, 1]


def test_a_cache_that_cannot_be_written_costs_only_time(official, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    one, two = (load("gtsrb", official, tmp_path / "file") for _ in range(2))
    assert one.digest == two.digest


# -- downloads ---------------------------------------------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path):
    (tmp_path / "site").mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path / "site"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield tmp_path / "site", f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_is_verified_and_not_repeated(site, tmp_path):
    folder, address = site
    content = numbers(3_000_000).tobytes()
    (folder / "a.bin").write_bytes(content)
    source = Source(f"{address}/a.bin", "deep/a.bin", f"sha256:{hashlib.sha256(content).hexdigest()}")
    told = []
    path = fetch(source, tmp_path / "data", lambda *news: told.append(news))
    assert path.read_bytes() == content
    assert told[-1] == ("deep/a.bin", 3_000_000, 3_000_000)
    assert len(told) >= 3
    (folder / "a.bin").unlink()
    assert fetch(source, tmp_path / "data") == path  # it is there already
    path.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match="Delete it"):
        fetch(source, tmp_path / "data")


def test_a_wrong_or_failed_download_leaves_nothing(site, tmp_path):
    folder, address = site
    (folder / "a.bin").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="It was not kept"):
        fetch(Source(f"{address}/a.bin", "a.bin", "md5:00"), tmp_path / "data")
    with pytest.raises(ConfigError, match=r"could not be downloaded.*404"):
        fetch(Source(f"{address}/b.bin", "b.bin", "md5:00"), tmp_path / "data")
    with pytest.raises(ConfigError, match="could not be downloaded"):
        fetch(Source("http://127.0.0.1:9/b.bin", "b.bin", "md5:00"), tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_every_published_file_has_an_address_and_a_checksum():
    for kind in datasets.DATASETS:
        for source in getattr(kind, "sources", ()):
            assert source.url.startswith("https://")
            way, _, value = source.checksum.partition(":")
            assert len(value) == {"md5": 32, "sha256": 64}[way]
    assert datasets.download("digits") == []


def test_what_was_downloaded_is_found(site, official, tmp_path, monkeypatch):
    folder, address = site
    monkeypatch.chdir(tmp_path)
    packed = zipped(official, folder / "gtsrb")
    sources = tuple(
        Source(f"{address}/gtsrb/{name}", name, f"md5:{hashlib.md5((packed / name).read_bytes()).hexdigest()}")
        for name in data_gtsrb.ZIPS
    )
    monkeypatch.setattr(GTSRB, "sources", sources)
    assert len(datasets.download("gtsrb")) == 3
    assert load("gtsrb").digest == load("gtsrb", official).digest
