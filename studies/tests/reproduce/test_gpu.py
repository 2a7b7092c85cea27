# SPDX-License-Identifier: Apache-2.0
"""The study on CUDA gives what the same watcher gives on a CPU: one small condition, measured at every iteration."""

import dataclasses
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import torch

from fedvitals.lab.data.arrays import Arrays
from fedvitals_studies.reproduce import measure as measuring
from fedvitals_studies.reproduce.conditions import BY_NAME, richly
from fedvitals_studies.reproduce.results import checked

pytestmark = pytest.mark.gpu
SMALL = {"clients": 8, "rounds": 2, "iterations": 4, "channels": (4, 8), "dataset": "synthetic"}


@pytest.mark.parametrize("name", ["extended-hierarchical-baseline", "extended-centralized-exploding"])
def test_the_study_on_cuda_measures_what_it_measures_on_a_cpu(name):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    agree(name, "cuda")


@contextmanager
def small_images():
    """In place of GTSRB, random images of ten classes, each of its own brightness."""
    rng, made = np.random.default_rng(0), measuring.experiment_of
    y = np.arange(400) % 10
    x = (rng.integers(0, 120, (400, 3, 12, 12)) + 12 * y[:, None, None, None]).astype(np.uint8)
    images = Arrays(x[:320], y[:320], x[320:], y[320:], name="images")
    measuring.experiment_of = lambda *of: msgspec.structs.replace(made(*of), dataset=images)
    try:
        yield
    finally:
        measuring.experiment_of = made


def agree(name, device):
    condition = dataclasses.replace(richly(BY_NAME[name]), **SMALL)
    with small_images():
        found = checked(measuring.measure(condition, 0, device=device, arrays=True), condition, 0)
        twin = measuring.measure(condition, 0, device="cpu", arrays=True)
    assert set(found["series"]) == set(twin["series"])
    for series, values in twin["series"].items():
        for key, part in values.items() if isinstance(values, dict) else [("", values)]:
            ours = np.array(found["series"][series][key] if key else found["series"][series], float)
            theirs = np.array(part, float)
            assert np.array_equal(np.isnan(ours), np.isnan(theirs)), (series, key)
            # What is estimated has other random signs there; a signed mean is a difference of large numbers.
            estimated = series.startswith(("scale.", "iteration.gsc")) and series != "scale.gsc_exact"
            close = 0.5 if estimated else 0.05
            size = np.nanmax(np.abs(theirs), initial=0)
            if "mean" in series or series == "iteration.difference":
                size = max(size, *sizes(twin["series"], series, key))
            size = max(size, 0.1) if series == "scale.zero_samples" else size  # an estimate below 0 counts as one
            assert np.nanmax(np.abs(ours - theirs), initial=0) <= close * size + 1e-9, (series, key, ours, theirs)


def sizes(series, name, key):
    """Of the magnitudes beside a signed series."""
    other = name.replace(".mean", ".magnitude").replace("difference", "difference_absolute")
    return [np.nanmax(np.array(series[other][key], float), initial=0)]
