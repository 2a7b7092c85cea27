# SPDX-License-Identifier: Apache-2.0
"""One client's share of German traffic signs, for the benchmarks of gradient scale; the lab finds and reads them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.data import datasets
from fedvitals.lab.data.gtsrb import GTSRB
from fedvitals.lab.data.sources import search_folders


def folder(data: str | os.PathLike[str] | None = None) -> Path | None:
    """Return their folder: below the given one, else FEDVITALS_DATA or ../shared/data; None if they are missing."""
    try:
        files, _ = GTSRB().find(search_folders(data))
    except ConfigError:
        return None
    return files[0].parent


def load(data: str | os.PathLike[str] | None = None, images: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images [N, 3, 32, 32] with values from 0 to 1, and labels, shuffled; at most `images` of them."""
    found = datasets.load(GTSRB(), data)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(found.y))[:images])
    return found.inputs(found.x[order]), found.y[order]
