# SPDX-License-Identifier: Apache-2.0
"""Fashion-MNIST and CIFAR-10: every published form gives the same arrays, damage is named, and no pickle is run."""

import gzip
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedvitals.errors import ConfigError
from fedvitals.lab.data import image_archives, limits
from fedvitals.lab.data.datasets import dataset_named, load
from fedvitals.lab.data.image_archives import CIFAR10

SHARED = Path.cwd().parent / "shared" / "data"
shared = pytest.mark.skipif(not SHARED.exists(), reason="the shared data sets are not here")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">u4").tobytes() + array.tobytes()


def test_fashion_mnist_plain_and_packed(tmp_path):
    arrays = [
        numbers(6, 28, 28),
        np.arange(6, dtype=np.uint8),
        numbers(2, 28, 28, seed=1),
        np.arange(2, dtype=np.uint8),
    ]
    names = dataset_named("fashion-mnist").files
    packed, plain = tmp_path / "a" / "fashion-mnist", tmp_path / "b" / "FashionMNIST" / "raw"
    packed.mkdir(parents=True)
    plain.mkdir(parents=True)
    for name, array in zip(names, arrays, strict=True):
        (packed / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        (plain / name).write_bytes(idx(array))
    one, two = load("fashion-mnist", tmp_path / "a"), load("fashion-mnist", tmp_path / "b")
    assert one.digest == two.digest
    assert np.array_equal(one.x[:, 0].numpy(), arrays[0])
    assert one.test_y.tolist() == [0, 1]
    (plain / names[0]).write_bytes(idx(arrays[0])[:-1])
    with pytest.raises(ConfigError, match="no complete idx file"):
        load("fashion-mnist", tmp_path / "b")
    (packed / f"{names[0]}.gz").write_bytes(gzip.compress(idx(arrays[0]))[:-20])
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        load("fashion-mnist", tmp_path / "a")
    (plain / names[3]).unlink()
    with pytest.raises(ConfigError, match="not complete"):
        load("fashion-mnist", tmp_path / "b")


@shared
def test_the_shared_fashion_mnist():
    data = load("fashion-mnist", SHARED)
    assert torch.bincount(data.y).tolist() == [6000] * 10
    assert data.test_x.shape == (10_000, 1, 28, 28)


def python_2_batch(pixels, labels):
    """What Python 2's pickle wrote for these files: strings that are bytes, protocol 2, numpy's old module."""
    listed = b"".join(b"K" + bytes([label]) for label in labels)
    shape = b"M" + len(labels).to_bytes(2, "little") + b"M\x00\x0c\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + shape
        + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + pixels.size.to_bytes(4, "little") + pixels.tobytes() + b"tb"
    )  # fmt: skip
    return b"\x80\x02}(U\x0bbatch_labelU\x05batchU\x06labels](" + listed + b"eU\x04data" + array + b"u."


CIFAR = [(numbers(4, 3072, seed=seed), [seed, 1, 2, 9]) for seed in range(6)]
NAMES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]


def write_cifar(folder, form):
    folder.mkdir(parents=True)
    for name, (pixels, labels) in zip(NAMES, CIFAR, strict=True):
        if form == "bin":
            records = np.concatenate([np.asarray(labels, np.uint8)[:, None], pixels], 1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        elif form == "py2":
            (folder / name).write_bytes(python_2_batch(pixels, labels))
        else:
            (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels}, protocol=4))


def test_the_hand_written_pickle_is_one():
    read = pickle.loads(python_2_batch(*CIFAR[1]), encoding="bytes")
    assert np.array_equal(read[b"data"], CIFAR[1][0])


def test_cifar10_in_all_its_forms(tmp_path):
    found = []
    for form, folder in (
        ("bin", "cifar-10-batches-bin"),
        ("py2", "cifar-10-batches-py"),
        ("py3", "cifar-10-batches-py"),
    ):
        write_cifar(tmp_path / form / folder, form)
        found.append(load("cifar10", tmp_path / form))
        archive = "cifar-10-binary.tar.gz" if form == "bin" else "cifar-10-python.tar.gz"
        (tmp_path / f"packed {form}").mkdir()
        with tarfile.open(tmp_path / f"packed {form}" / archive, "w:gz") as file:
            file.add(tmp_path / form / folder, folder)
        found.append(load("cifar10", tmp_path / f"packed {form}"))
    assert len({data.digest for data in found}) == 1
    assert found[0].x.shape == (20, 3, 32, 32)
    assert found[0].y.tolist()[::4] == [0, 1, 2, 3, 4]
    assert np.array_equal(found[0].test_x.flatten(1).numpy(), CIFAR[5][0])
    assert found[0].name == "cifar10"


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["code", "torn", "shape", "no dict"])
def test_a_pickle_that_is_no_batch_is_refused_and_not_run(tmp_path, kind):
    write_cifar(tmp_path / "cifar-10-batches-py", "py2")
    hurt, touched = tmp_path / "cifar-10-batches-py" / "data_batch_3", tmp_path / "touched"
    hurt.write_bytes(
        {
            "code": pickle.dumps({b"data": Evil(touched), b"labels": []}),
            "torn": python_2_batch(*CIFAR[0])[:5000],
            "shape": python_2_batch(CIFAR[0][0][:, :3000], CIFAR[0][1]),
            "no dict": pickle.dumps([1, 2]),
        }[kind]
    )
    with pytest.raises(ConfigError, match="data_batch_3 is not an official python batch"):
        load("cifar10", tmp_path)
    assert not touched.exists()


def test_the_jpeg_copy_is_named_so(tmp_path):
    parts = {}
    for part, count in (("train", 5), ("test", 2)):
        encoded = []
        for index in range(count):
            buffer = io.BytesIO()
            Image.fromarray(np.full((32, 32, 3), 40 * index, np.uint8)).save(buffer, "JPEG")
            encoded.append(buffer.getvalue())
        parts |= {
            f"{part}_jpeg": np.frombuffer(b"".join(encoded), np.uint8),
            f"{part}_off": np.cumsum([0, *map(len, encoded)]),
            f"{part}_y": np.arange(count, dtype=np.uint8),
        }
    np.savez(tmp_path / "cifar10_jpeg.npz", **parts)
    data = load(CIFAR10(), tmp_path)
    assert data.name == "cifar10 (JPEG copy)"
    assert (data.x.float().mean((1, 2, 3)) - 40 * torch.arange(5)).abs().max() <= 1


def test_files_that_unpack_to_far_more_than_a_data_set_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "FILE_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "ARCHIVE_BYTES", 1 << 20)
    bomb, zeros = tmp_path / "train-images-idx3-ubyte.gz", bytes(2 << 20)
    bomb.write_bytes(gzip.compress(zeros))
    with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte.gz unpacks to more than 1,048,576 bytes"):
        image_archives._read_idx(bomb)
    form = image_archives.BATCH_FORMATS[0]
    with tarfile.open(tmp_path / form.archive, "w:gz") as archive:
        member = tarfile.TarInfo(f"{form.folder}/{form.batches[0]}")
        member.size = len(zeros)
        archive.addfile(member, io.BytesIO(zeros))
    with pytest.raises(ConfigError, match="unpacks to more than"):
        image_archives._read_batch_archive(tmp_path / form.archive, form)
    np.savez_compressed(tmp_path / "copy.npz", train_jpeg=np.zeros(2 << 20, np.uint8))
    with pytest.raises(ConfigError, match=r"copy.npz would unpack to 2,0"):
        image_archives._read_jpeg_copy(tmp_path / "copy.npz")
