# SPDX-License-Identifier: Apache-2.0
"""GTSRB as the two packed files that numpy alone can read: existing ones, or made from the official images."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedvitals.lab.data.datasets import Dataset, load
from fedvitals.lab.data.gtsrb import GTSRB, PACKED
from fedvitals.lab.data.sources import search_folders


@contextmanager
def packed_gtsrb(data: Path | None = None) -> Iterator[list[Path]]:
    """Yield the files; temporary ones are removed at the end."""
    sources, _ = GTSRB().find(search_folders(data))
    if tuple(path.name for path in sources) == PACKED:
        yield sources
        return
    with tempfile.TemporaryDirectory() as folder:
        yield write(Path(folder), load("gtsrb", data))


def write(folder: Path, dataset: Dataset) -> list[Path]:
    """Write files for `data_gtsrb`: differences modulo 256, colours from green, then each pixel from its neighbours."""
    files = [folder / name for name in PACKED]
    for file, x, y, groups in zip(
        files,
        (dataset.x, dataset.test_x),
        (dataset.y, dataset.test_y),
        (dataset.groups, None),
        strict=True,
    ):
        pixels, labels = x.numpy().copy(), y.numpy()
        pixels[:, 0] -= pixels[:, 1]
        pixels[:, 2] -= pixels[:, 1]
        for axis in (3, 2):
            pixels = np.diff(pixels, axis=axis, prepend=np.zeros_like(pixels.take([0], axis)))
        track = {} if groups is None else {"track": groups.numpy() - labels * 100}
        np.savez_compressed(file, x_delta=pixels, y=labels, **track)
    return files
