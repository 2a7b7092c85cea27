# SPDX-License-Identifier: Apache-2.0
"""Data sets that stay on a device from one experiment to the next."""

import dataclasses

import torch

from fedvitals.lab.data import cache as module
from fedvitals.lab.data.cache import KEPT, resident
from fedvitals.lab.data.datasets import Dataset


def dataset(digest):
    x, y = torch.arange(12, dtype=torch.uint8).view(3, 4), torch.arange(3)
    return Dataset("bytes", x, y, x[:1], y[:1], None, 3, digest)


def test_a_data_set_is_uploaded_once_and_the_last_used_are_kept(monkeypatch):
    monkeypatch.setattr(module, "_resident", {})
    first = resident(dataset("a"), "cpu")
    assert resident(dataclasses.replace(dataset("a"), divisor=1.0), "cpu") is first  # the same bytes, however used
    assert first.x.dtype == torch.uint8
    for digest in "bacd":
        resident(dataset(digest), "cpu")
    assert [key[0] for key in module._resident] == ["c", "d"]
    assert len(module._resident) == KEPT
