# SPDX-License-Identifier: Apache-2.0
"""A data set that stays on a device from one experiment to the next, as it is stored: images as bytes.

A study of many short experiments would else upload the same images, four times as large, for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvitals.lab.data.datasets import Dataset

KEPT = 2  # data sets, those that were used last


@dataclass(frozen=True, slots=True)
class Resident:
    """The tensors of a `Dataset` on a device; `Dataset.inputs` makes of rows of them what a model takes."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


_kept: dict[tuple[str, torch.device], Resident] = {}


def resident(dataset: Dataset, device: torch.device | str) -> Resident:
    """The data set there: uploaded when first asked for, known again by its digest."""
    key = (dataset.digest, torch.device(device))
    found = _kept.pop(key, None)
    if found is None:
        found = Resident(*(part.to(key[1]) for part in (dataset.x, dataset.y, dataset.test_x, dataset.test_y)))
    _kept[key] = found  # as the one used last
    for old in [*_kept][:-KEPT]:
        del _kept[old]
    return found
