# SPDX-License-Identifier: Apache-2.0
"""Readers for Fashion-MNIST (four idx files) and CIFAR-10 (official python or binary batches, or a JPEG copy)."""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.lab.data.arrays import Arrays
from fedvitals.lab.data.limits import check_npz_size, read_bounded, read_gzip
from fedvitals.lab.data.pickles import read_batch as pickled_batch
from fedvitals.lab.data.sources import PublishedDataset, Source, missing_dataset_error

Numbers = np.ndarray[Any, Any]


class FashionMNIST(PublishedDataset, frozen=True):
    """60,000 training and 10,000 test images of clothes in grey, 28 × 28 (Xiao, Rasul, Vollgraf 2017), or a subset.

    Args:
        samples: How many training images to use; by default all.
        test_samples: How many test images to use; by default all.
    """

    files: ClassVar[tuple[str, ...]] = (
        "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
    )  # fmt: skip
    checksums: ClassVar[tuple[str, ...]] = (
        "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    )
    page: ClassVar[str] = "https://github.com/zalandoresearch/fashion-mnist"
    sources: ClassVar[tuple[Source, ...]] = tuple(
        Source(f"{address}/raw/master/data/fashion/{name}.gz", f"fashion-mnist/{name}.gz", checksum)
        for address, name, checksum in zip([page] * 4, files, checksums, strict=True)
    )

    def find(self, folders: Sequence[Path]) -> tuple[list[Path], Callable[[], Arrays]]:
        """Return the files of the data set, and the function that reads them."""
        for folder in folders:
            for inside in (folder / "fashion-mnist", folder / "FashionMNIST" / "raw", folder):
                paths = [_plain_or_gzipped(inside / name) for name in self.files]
                if paths[0].exists():
                    return _require_all("Fashion-MNIST", paths, self.page), partial(_read_fashion_mnist, paths)
        raise missing_dataset_error(
            "fashion_mnist", self.page, "its four idx files (fashion-mnist/*-ubyte.gz)", folders
        )


class CIFAR10(PublishedDataset, frozen=True):
    """50,000 training and 10,000 test images in colour, 32 × 32 (A. Krizhevsky 2009), or a subset.

    The JPEG copy (`cifar10_jpeg.npz`) does not have the original pixels; a data set read from it is named accordingly.

    Args:
        samples: How many training images to use; by default all.
        test_samples: How many test images to use; by default all.
    """

    page: ClassVar[str] = "https://www.cs.toronto.edu/~kriz/cifar.html"
    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
        ),
    )

    def find(self, folders: Sequence[Path]) -> tuple[list[Path], Callable[[], Arrays]]:
        """Return the files of the data set, and the function that reads them."""
        for folder in folders:
            for form in BATCH_FORMATS:
                for inside in (folder / form.folder, folder):
                    files = [inside / name for name in form.batches]
                    if files[0].exists():
                        return _require_all("CIFAR-10", files, self.page), partial(_read_batch_files, files, form)
                if (folder / form.archive).exists():
                    return [folder / form.archive], partial(_read_batch_archive, folder / form.archive, form)
            copy = folder / "cifar10_jpeg.npz"
            if copy.exists():
                return [copy], partial(_read_jpeg_copy, copy)
        wanted = "cifar-10-binary.tar.gz or cifar-10-python.tar.gz (or its content, a folder of batches)"
        raise missing_dataset_error("cifar10", self.page, wanted, folders)


def _require_all(name: str, paths: list[Path], page: str) -> list[Path]:
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{name} is not complete: {path} is missing. Get it from {page}.")
    return paths


# -- Fashion-MNIST -------------------------------------------------------------------------------------------------


def _plain_or_gzipped(path: Path) -> Path:
    return path if path.exists() else path.with_name(path.name + ".gz")


def _read_fashion_mnist(files: Sequence[Path]) -> Arrays:
    x, y, test_x, test_y = (_read_idx(path) for path in files)
    return Arrays(x[:, None], y, test_x[:, None], test_y, classes=10, name="fashion_mnist")


def _read_idx(path: Path) -> Numbers:
    """The idx format: two zero bytes, 8 for uint8, the number of axes, each axis as a 32-bit number, then the bytes."""
    try:
        raw = read_gzip(path) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be unpacked: {error}. Get the file anew.") from error
    axes = raw[3] if raw[:3] == b"\0\0\x08" and len(raw) > 3 else 0
    shape = np.frombuffer(raw, ">u4", axes, 4).tolist() if axes and len(raw) >= 4 + 4 * axes else []
    if not shape or len(raw) != 4 + 4 * axes + int(np.prod(shape, dtype=np.int64)):
        raise ConfigError(f"{path} is no complete idx file of bytes ({len(raw)} bytes, axes {shape}). Get it anew.")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()


# -- CIFAR-10 ------------------------------------------------------------------------------------------------------

Batch = tuple[Numbers, Numbers]
"""Images [N, 3, 32, 32] and labels [N]."""


def _join_batches(read: Sequence[Batch]) -> Arrays:
    x, y = (np.concatenate([batch[part] for batch in read[:-1]]) for part in (0, 1))
    return Arrays(x, y, *read[-1], classes=10, name="cifar10")


def _binary_batch(raw: bytes, name: str) -> Batch:
    """A record is one byte of label and 3,072 of pixels: red, green, blue, row by row."""
    if not raw or len(raw) % 3073:
        raise ConfigError(f"CIFAR-10: {name} has {len(raw)} bytes, not a multiple of 3,073. Get it anew.")
    records = np.frombuffer(raw, np.uint8).reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32).copy(), records[:, 0].astype(np.int64)


@dataclass(frozen=True)
class _BatchFormat:
    """One of the two forms in which the official batches are published."""

    folder: str
    archive: str
    batches: tuple[str, ...]
    read: Callable[[bytes, str], Batch]


BATCH_NAMES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
BATCH_FORMATS = (
    _BatchFormat(
        "cifar-10-batches-bin", "cifar-10-binary.tar.gz", tuple(f"{n}.bin" for n in BATCH_NAMES), _binary_batch
    ),
    _BatchFormat("cifar-10-batches-py", "cifar-10-python.tar.gz", BATCH_NAMES, pickled_batch),
)


def _read_batch_files(files: Sequence[Path], form: _BatchFormat) -> Arrays:
    return _join_batches([form.read(file.read_bytes(), str(file)) for file in files])


def _read_batch_archive(path: Path, form: _BatchFormat) -> Arrays:
    """Read the batches from the archive without extracting anything to disk."""
    members = [f"{form.folder}/{name}" for name in form.batches]
    batches: dict[str, Batch] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:  # in the archive's order, since a gzip cannot be sought in
                file = archive.extractfile(member) if member.name in members else None
                if file is not None:
                    batches[member.name] = form.read(read_bounded(file, f"{path}: {member.name}"), member.name)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be unpacked: {error}. Get the file anew.") from error
    for name in members:
        if name not in batches:
            raise ConfigError(f"{path} does not hold {name}. Get the file anew.")
    return _join_batches([batches[name] for name in members])


def _read_jpeg_copy(path: Path) -> Arrays:
    try:
        check_npz_size(path)
        with np.load(path, allow_pickle=False) as packed:
            x, y = _decode_images(packed["train_jpeg"], packed["train_off"]), packed["train_y"].astype(np.int64)
            test_x, test_y = _decode_images(packed["test_jpeg"], packed["test_off"]), packed["test_y"].astype(np.int64)
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} cannot be read as a JPEG copy of CIFAR-10: {error}. Get the file anew.") from error
    return Arrays(x, y, test_x, test_y, classes=10, name="cifar10 (JPEG copy)")


def _decode_images(data: Numbers, offsets: Numbers) -> Numbers:
    try:
        from PIL import Image  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise MissingExtraError("Pillow", "lab", "The JPEG copy of CIFAR-10") from error
    raw, images = data.tobytes(), np.empty((len(offsets) - 1, 3, 32, 32), np.uint8)
    for index, (begin, end) in enumerate(pairwise(offsets)):
        with Image.open(io.BytesIO(raw[int(begin) : int(end)])) as image:
            if image.size != (32, 32):  # known before it is decoded
                raise ValueError(f"image {index} has {image.size} pixels, not 32 × 32")
            images[index] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    return images
