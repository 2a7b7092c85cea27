# SPDX-License-Identifier: Apache-2.0
"""German traffic signs (GTSRB), 32 × 32: from one packed pair of files, the official folders, or the official zips.

J. Stallkamp, M. Schlipsing, J. Salmen, C. Igel, «Man vs. computer: Benchmarking machine learning algorithms for traffic
sign recognition», Neural Networks 32, 2012. Whole images, not cropped to the sign, resized with Pillow's BILINEAR; in
the order of class, track and frame. All three forms give the same bytes. A track is 30 photos of one physical sign: it
is the group by which the partition `natural` deals, while `iid` deals by image, as the paper did.
"""

from __future__ import annotations

import csv
import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.lab.data.arrays import Arrays
from fedvitals.lab.data.limits import check_npz_size, read_member
from fedvitals.lab.data.sources import PublishedDataset, Source, missing_dataset_error

CLASSES, SIDE = 43, 32
TRAIN_IMAGES, TEST_IMAGES = 39_209, 12_630
DIGEST = "889b0b56afdfcb548777a89b123a34b02e9a5bac79bcb7b58948c68667ca1702"
"""Of the complete data set: whatever claims to be made with GTSRB can be held against it."""

PACKED = ("gtsrb32_train.npz", "gtsrb32_test.npz")
ZIPS = ("GTSRB_Final_Training_Images.zip", "GTSRB_Final_Test_Images.zip", "GTSRB_Final_Test_GT.zip")
TRAIN, TEST, TRUTH = "GTSRB/Final_Training/Images", "GTSRB/Final_Test/Images", "GT-final_test.csv"
ARCHIVE = "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370"


class GTSRB(PublishedDataset, frozen=True):
    """The German traffic signs: 39,209 training and 12,630 test images of 43 classes, or a fixed subset.

    Args:
        samples: How many training images to use; by default all.
        test_samples: How many test images to use; by default all.
        divisor: What the pixels are divided by; 1 leaves them in the range from 0 to 255.
    """

    divisor: float = 255.0  # of the pixels: 1 leaves them from 0 to 255

    sources: ClassVar[tuple[Source, ...]] = (
        Source(f"{ARCHIVE}/{ZIPS[0]}", ZIPS[0], "md5:f33fd80ac59bff73c82d25ab499e03a3"),
        Source(f"{ARCHIVE}/{ZIPS[1]}", ZIPS[1], "md5:c7e4e6327067d32654124b0fe9e82185"),
        Source(f"{ARCHIVE}/{ZIPS[2]}", ZIPS[2], "md5:fe31e9c9270bbcd7b84b7f21a9d9d9e5"),
    )

    def find(self, folders: Sequence[Path]) -> tuple[list[Path], Callable[[], Arrays]]:
        """Return the files or folders of the data set, and the function that reads them."""
        for folder in folders:
            # The user may name the folder GTSRB itself.
            root = folder.parent if folder.name == "GTSRB" else folder
            for paths, read in (
                ([folder / name for name in PACKED], _read_packed),
                ([root / TRAIN, root / TEST, _test_labels_path(root)], _read_folders),
                ([folder / name for name in ZIPS], _read_zips),
            ):
                if paths[0].exists():
                    _require_all(paths)
                    return paths, partial(read, paths)
        files = f"{', '.join(ZIPS)} (or their content, the folder GTSRB)"
        raise missing_dataset_error("gtsrb", "https://benchmark.ini.rub.de/gtsrb_dataset.html", files, folders)


def _test_labels_path(root: Path) -> Path:
    """Return the path of the test labels, in any of the places where it is usually unpacked."""
    usual = [root / TEST / TRUTH, root / "GTSRB" / "Final_Test" / TRUTH, root / "GTSRB" / TRUTH, root / TRUTH]
    return next((path for path in usual if path.exists()), usual[0])


def _require_all(paths: Iterable[Path]) -> None:
    for path in paths:
        if not path.exists():
            raise ConfigError(f"GTSRB is not complete: {path} is missing. Put it there, from {ARCHIVE}.")


Labelled = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any] | None]
"""Images [N, 3, 32, 32], classes [N], and the groups [N] of the training set."""


def _assemble(train: Labelled, test: Labelled) -> Arrays:
    complete = len(train[1]) == TRAIN_IMAGES and len(test[1]) == TEST_IMAGES
    name = "gtsrb" if complete else f"gtsrb ({len(train[1])} and {len(test[1])} images of it)"
    return Arrays(train[0], train[1], test[0], test[1], groups=train[2], classes=CLASSES, name=name)


def _read_packed(paths: Sequence[Path]) -> Arrays:
    return _assemble(_decode_packed(paths[0]), _decode_packed(paths[1]))


def _decode_packed(path: Path) -> Labelled:
    """The images lie in the file as differences modulo 256: colours from green, then each pixel from its neighbours."""
    try:
        check_npz_size(path)
        with np.load(path, allow_pickle=False) as packed:
            pixels, labels = packed["x_delta"], packed["y"].astype(np.int64)
            groups = labels * 100 + packed["track"] if "track" in packed else None
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} cannot be read as packed GTSRB: {error}. Get the file anew.") from error
    pixels = np.cumsum(np.cumsum(pixels, axis=2, dtype=np.uint8), axis=3, dtype=np.uint8)
    pixels[:, 0] += pixels[:, 1]
    pixels[:, 2] += pixels[:, 1]
    return pixels, labels, groups


# -- the official layout -------------------------------------------------------------------------------------------


class _Tree(Protocol):
    """Files by their path below the folder `Images`, in a folder or in a zip."""

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes: ...


@dataclass(frozen=True)
class _Folder:
    path: Path

    def names(self) -> list[str]:
        return [path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()]

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()


@dataclass(frozen=True)
class _Zip:
    file: zipfile.ZipFile
    prefix: str

    def names(self) -> list[str]:
        return [name.removeprefix(self.prefix) for name in self.file.namelist() if name.startswith(self.prefix)]

    def read(self, name: str) -> bytes:
        return read_member(self.file, self.prefix + name)


def _read_folders(paths: Sequence[Path]) -> Arrays:
    return _read_official(_Folder(paths[0]), _Folder(paths[1]), paths[2].read_text(encoding="utf-8"))


def _read_zips(paths: Sequence[Path]) -> Arrays:
    with ExitStack() as stack:
        try:
            train, test, truth = (stack.enter_context(zipfile.ZipFile(path)) for path in paths)
            inside = next((name for name in truth.namelist() if name.endswith(TRUTH)), TRUTH)
            return _read_official(_Zip(train, TRAIN + "/"), _Zip(test, TEST + "/"), read_member(truth, inside).decode())
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
            listed = ", ".join(map(str, paths))
            raise ConfigError(f"One of {listed} is damaged: {error}. Delete it, and download it anew.") from error


def _read_official(train: _Tree, test: _Tree, truth: str) -> Arrays:
    labelled = []
    for folder, row in _training_rows(train):
        track, _, frame = row["Filename"].removesuffix(".ppm").partition("_")
        labelled.append((int(folder), int(track), int(frame), f"{folder}/{row['Filename']}"))
    labelled.sort()
    groups = [label * 100 + track for label, track, _, _ in labelled]
    tests = sorted((row["Filename"], int(row["ClassId"])) for row in _rows(truth, TRUTH))
    images, test_images = _images(train, [name for *_, name in labelled]), _images(test, [name for name, _ in tests])
    labels, test_labels = _numbers([label for label, *_ in labelled]), _numbers([label for _, label in tests])
    return _assemble((images, labels, _numbers(groups)), (test_images, test_labels, None))


def _training_rows(train: _Tree) -> Iterator[tuple[str, dict[str, str]]]:
    lists = sorted(name for name in train.names() if re.fullmatch(r"\d{5}/GT-\d{5}\.csv", name))
    for name in lists:
        folder = name[:5]
        for row in _rows(train.read(name).decode(), name):
            if int(row["ClassId"]) != int(folder) or not re.fullmatch(r"\d{5}_\d{5}\.ppm", row["Filename"]):
                raise ConfigError(f"GTSRB: {name} lists {row['Filename']} of class {row['ClassId']}. Unpack it anew.")
            yield folder, row
    if not lists:
        raise ConfigError(f"GTSRB: there is no {TRAIN}/00000/GT-00000.csv, nor one of another class. Unpack it anew.")


def _rows(text: str, name: str) -> list[dict[str, str]]:
    rows = list(csv.DictReader(io.StringIO(text), delimiter=";"))
    for row in rows:
        label = row.get("ClassId") or ""
        if not row.get("Filename") or not label.isdecimal() or int(label) >= CLASSES:
            raise ConfigError(f"GTSRB: {name} has a line without Filename and ClassId 0..{CLASSES - 1}: {row}.")
    if not rows:
        raise ConfigError(f"GTSRB: {name} lists no image. Unpack it anew.")
    return rows


def _numbers(values: list[int]) -> np.ndarray[Any, Any]:
    return np.asarray(values, np.int64)


def _images(tree: _Tree, names: Sequence[str]) -> np.ndarray[Any, Any]:
    try:
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise MissingExtraError("Pillow", "lab", "Reading GTSRB's ppm images") from error
    images = np.empty((len(names), 3, SIDE, SIDE), np.uint8)
    for index, name in enumerate(names):
        try:
            with Image.open(io.BytesIO(tree.read(name))) as image:
                small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        except (OSError, KeyError, UnidentifiedImageError) as error:
            raise ConfigError(f"GTSRB: the image {name} is missing or damaged: {error}. Unpack it anew.") from error
        images[index] = np.asarray(small).transpose(2, 0, 1)
    return images
