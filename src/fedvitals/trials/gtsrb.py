# SPDX-License-Identifier: Apache-2.0
"""German traffic signs, 32 × 32, from a packed file: `gtsrb32_train.npz`, in a folder that the user names.

The images lie in it as differences, modulo 256: red and blue minus green, then horizontally and vertically.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedvitals.errors import ConfigError

FILE = "gtsrb32_train.npz"


def folder(data: str | os.PathLike[str] | None = None) -> Path | None:
    """Where the file lies: the folder given, else FEDVITALS_DATA, else ../shared/data; None if it is in none."""
    places = [data, os.environ.get("FEDVITALS_DATA"), Path.cwd().parent / "shared" / "data"]
    return next((Path(place) for place in places if place and (Path(place) / FILE).exists()), None)


def load(data: str | os.PathLike[str] | None = None, images: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32] with values from 0 to 1, and labels, shuffled by image; at most `images` of them."""
    place = folder(data)
    if place is None:
        raise ConfigError(
            f"GTSRB was not found: no {FILE} in --data, FEDVITALS_DATA or ../shared/data. Name the folder it lies in."
        )
    with np.load(place / FILE) as packed:
        labels = packed["y"]
        order = np.random.default_rng(seed).permutation(len(labels))[:images]
        pixels = packed["x_delta"][order]
    pixels = np.cumsum(np.cumsum(pixels, axis=2, dtype=np.uint8), axis=3, dtype=np.uint8)
    pixels[:, 0] += pixels[:, 1]
    pixels[:, 2] += pixels[:, 1]
    return torch.from_numpy(pixels).float() / 255, torch.from_numpy(labels[order].astype(np.int64))
