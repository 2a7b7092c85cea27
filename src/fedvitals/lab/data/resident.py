# SPDX-License-Identifier: Apache-2.0
"""Keeps data sets on a device from one experiment to the next, in their stored form (images as bytes).

Otherwise a study of many short experiments would upload the same images, four times as large, for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvitals.lab.data.datasets import Dataset

KEPT = 2  # data sets, those that were used last


@dataclass(frozen=True, slots=True)
class Resident:
    """The tensors of a `Dataset` on a device; `Dataset.inputs` turns their rows into model inputs."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


_kept: dict[tuple[str, torch.device], Resident] = {}


def resident(dataset: Dataset, device: torch.device | str) -> Resident:
    """Return the data set on the device, uploading it on first use; it is identified by its digest."""
    key = (dataset.digest, torch.device(device))
    tensors = _kept.pop(key, None)
    if tensors is None:
        tensors = Resident(*(part.to(key[1]) for part in (dataset.x, dataset.y, dataset.test_x, dataset.test_y)))
    _kept[key] = tensors  # as the one used last
    for old in [*_kept][:-KEPT]:
        del _kept[old]
    return tensors
