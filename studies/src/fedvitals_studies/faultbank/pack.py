# SPDX-License-Identifier: Apache-2.0
"""Packs a fault bank for a machine with a GPU and without a network: code, bank, and the data that its cases use.

Cases train on a few thousand images of data sets that have tens of thousands: only those are written as separate data
sets, in the format in which the lab reads the complete ones. Loaded there, they are the same samples in the same order.
"""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedvitals.errors import MissingExtraError
from fedvitals.lab.data import datasets
from fedvitals.lab.data.gtsrb import GTSRB, PACKED
from fedvitals.lab.data.image_archives import BATCH_FORMATS, CIFAR10, FashionMNIST
from fedvitals.lab.data.sources import search_folders
from fedvitals_studies.faultbank.cases import Bank
from fedvitals_studies.faultbank.remote_run import BANK
from fedvitals_studies.faultbank.stand_ins import bring_stand_ins
from fedvitals_studies.packs.pack import Packed, pack

ENTRY = "fedvitals_studies.faultbank.remote_run:main"


def pack_bank(
    bank: Bank, source: Path, folder: Path, data: Path | None, python: str = "3.12", wheels: Iterable[Path] = ()
) -> Packed:
    """Pack a bank. `source`: its file. Data sets without files, or used in several parts, are packed whole."""
    with tempfile.TemporaryDirectory() as drafts:
        files = [*data_files(bank, Path(drafts), data)]
        packed = pack(folder, data=files, entry=ENTRY, python=python, wheels=[*wheels])
    shutil.copyfile(source, packed.code / BANK)
    _bring_toml(packed.code)
    bring_stand_ins(bank, packed.code)
    return packed


def data_files(bank: Bank, drafts: Path, data: Path | None) -> Iterable[Path]:
    """Yield the files of the data sets of all cases."""
    described: dict[type, set[Any]] = {}
    for case in bank.faulty:
        described.setdefault(type(case.experiment.dataset), set()).add(case.experiment.dataset)
    for kind, wanted in described.items():
        first = next(iter(wanted))
        if kind is GTSRB and len(wanted) == 1:
            yield from _gtsrb(datasets.load(first, data), drafts)
        elif kind is FashionMNIST and len(wanted) == 1:
            yield from _fashion(datasets.load(first, data), drafts)
        elif kind is CIFAR10 and len(wanted) == 1:
            yield _cifar(datasets.load(first, data), drafts)
        elif hasattr(first, "find"):
            yield from first.find(search_folders(data))[0]


def _fashion(dataset: datasets.Dataset, folder: Path) -> Iterable[Path]:
    for name, tensor in zip(
        FashionMNIST.files, (dataset.x[:, 0], dataset.y, dataset.test_x[:, 0], dataset.test_y), strict=True
    ):
        values = tensor.numpy().astype(np.uint8)
        head = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes()
        path = folder / f"{name}.gz"
        path.write_bytes(gzip.compress(head + values.tobytes(), mtime=0))
        yield path


def _cifar(dataset: datasets.Dataset, folder: Path) -> Path:
    """Write the data set as the official binary batches, which need no image decoder."""
    form = BATCH_FORMATS[0]
    pixels = [*dataset.x.tensor_split(5), dataset.test_x]
    labels = [*dataset.y.tensor_split(5), dataset.test_y]
    path = folder / form.archive
    with tarfile.open(path, "w:gz") as archive:
        for name, x, y in zip(form.batches, pixels, labels, strict=True):
            records = np.column_stack([y.numpy().astype(np.uint8), x.flatten(1).numpy()])
            about = tarfile.TarInfo(f"{form.folder}/{name}")
            about.size = records.nbytes
            archive.addfile(about, io.BytesIO(records.tobytes()))
    return path


def _gtsrb(dataset: datasets.Dataset, folder: Path) -> Iterable[Path]:
    parts = ((dataset.x, dataset.y, dataset.groups), (dataset.test_x, dataset.test_y, None))
    for name, (x, y, groups) in zip(PACKED, parts, strict=True):
        labels = y.numpy()
        arrays = {"x_delta": _differences(x.numpy()), "y": labels.astype(np.uint8)}
        if groups is not None:
            arrays["track"] = (groups.numpy() - 100 * labels).astype(np.uint8)
        path = folder / name
        np.savez_compressed(path, **arrays)
        yield path


def _differences(pixels: Any) -> Any:
    """Return differences modulo 256, as `data_gtsrb` reverts them: colours from green, then each pixel from its
    neighbours.
    """
    found = pixels.copy()
    found[:, 0] -= found[:, 1]
    found[:, 2] -= found[:, 1]
    for axis in (3, 2):
        found = np.diff(found, axis=axis, prepend=np.zeros_like(found.take([0], axis)))
    return found


def _bring_toml(code: Path) -> None:
    """Include the TOML writer: a case is identified by its experiment as TOML, and the library is pure Python."""
    try:
        import tomli_w  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise MissingExtraError("tomli-w", "lab", "Packing a fault bank") from error
    target = code / "tomli_w"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(Path(tomli_w.__file__).parent, target, ignore=shutil.ignore_patterns("__pycache__"))
