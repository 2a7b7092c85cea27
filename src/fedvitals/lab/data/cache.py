# SPDX-License-Identifier: Apache-2.0
"""The cache of data sets: decoded once, kept on disk for the next start and on devices for the next experiment.

On disk they are plain .npy files. A manifest, replaced atomically, lists the files that belong together, their sources
and their digest. An entry that does not match (a torn file, another source, another version) is built again; an
unwritable folder only costs time. The files are memory-mapped, so worker processes share them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedvitals.lab.data.arrays import Arrays, check_arrays, digest

if TYPE_CHECKING:
    from fedvitals.lab.data.datasets import Dataset

VERSION = 1
PARTS = ("x", "y", "test_x", "test_y", "groups")
KEPT = 2  # data sets, those that were used last


def load_or_build(cache: Path, kind: str, sources: Sequence[Path], build: Callable[[], Arrays]) -> tuple[Arrays, str]:
    """Return the data set and its digest: from the cache if its sources are unchanged, else built and stored."""
    state = [_fingerprint(path) for path in sources]
    # One entry for each place that the data set was read from: a newer version of the files replaces it.
    place = hashlib.sha256("\n".join(str(path.resolve()) for path in sources).encode()).hexdigest()[:12]
    entry = cache / "arrays" / f"{kind}-{place}"
    if _last and _last[0][:2] == (state, _fingerprint(entry)):
        return _last[0][2:]
    arrays_and_digest = _load_or_build(entry, state, build)
    _last[:] = [(state, _fingerprint(entry), *arrays_and_digest)]
    return arrays_and_digest


_last: list[tuple[list[list[Any]], list[Any], Arrays, str]] = []
"""The one that was asked for last: a study asks for the same again and again, and nobody changes it."""


def _load_or_build(entry: Path, state: list[list[Any]], build: Callable[[], Arrays]) -> tuple[Arrays, str]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return _read_entry(entry, state)
    arrays = build()
    checksum = digest(check_arrays(arrays))
    with contextlib.suppress(OSError):
        _write_entry(entry, state, arrays, checksum)
    return arrays, checksum


def _fingerprint(path: Path) -> list[Any]:
    """Return what reveals a changed file or folder without reading it: path, number of files, total size, newest
    time.
    """
    files = [path] if path.is_file() else [Path(root, name) for root, _, names in os.walk(path) for name in names]
    statuses = [file.stat() for file in files]
    newest = max((status.st_mtime_ns for status in statuses), default=0)
    return [str(path.resolve()), len(statuses), sum(status.st_size for status in statuses), newest]


def _read_entry(entry: Path, state: list[list[Any]]) -> tuple[Arrays, str]:
    manifest = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
    if manifest["version"] != VERSION or manifest["sources"] != state:
        raise ValueError("stale")
    # Copy on write: torch wants arrays that can be written to, and the file stays as it is.
    parts = {name: np.load(entry / file, mmap_mode="c", allow_pickle=False) for name, file in manifest["files"].items()}
    arrays = Arrays(**parts, classes=manifest["classes"], name=manifest["name"])
    checksum = digest(check_arrays(arrays))
    if checksum != manifest["digest"]:
        raise ValueError("torn")
    return arrays, checksum


def _write_entry(entry: Path, state: list[list[Any]], arrays: Arrays, checksum: str) -> None:
    entry.mkdir(parents=True, exist_ok=True)
    token, files = secrets.token_hex(4), {}
    try:
        for name in PARTS:
            array = getattr(arrays, name)
            if array is not None:
                files[name] = f"{name}-{token}.npy"
                np.save(entry / files[name], np.asarray(array), allow_pickle=False)
        draft = entry / f"manifest-{token}.json"
        manifest = {"version": VERSION, "name": arrays.name, "classes": arrays.classes, "digest": checksum}
        draft.write_text(json.dumps({**manifest, "sources": state, "files": files}), encoding="utf-8")
        draft.replace(entry / "manifest.json")
    except OSError:
        _remove(entry, lambda name: token in name)  # a full disk is not made fuller
        raise
    _remove(entry, lambda name: token not in name and name != "manifest.json")


def _remove(entry: Path, unwanted: Callable[[str], bool]) -> None:
    for path in entry.iterdir():
        if unwanted(path.name):
            with contextlib.suppress(OSError):  # another system may have it mapped still
                path.unlink()


# -- on a device ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resident:
    """The tensors of a `Dataset` on a device, as stored (images as bytes); `Dataset.inputs` makes inputs of them."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


_resident: dict[tuple[str, torch.device], Resident] = {}


def resident(dataset: Dataset, device: torch.device | str) -> Resident:
    """Return the data set on the device: uploaded when first asked for, known again by its digest.

    A study of many short experiments would otherwise upload the same images, four times as large, for each of them.
    """
    key = (dataset.digest, torch.device(device))
    tensors = _resident.pop(key, None)
    if tensors is None:
        tensors = Resident(*(part.to(key[1]) for part in (dataset.x, dataset.y, dataset.test_x, dataset.test_y)))
    _resident[key] = tensors  # as the one used last
    for old in [*_resident][:-KEPT]:
        del _resident[old]
    return tensors
