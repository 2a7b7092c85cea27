# SPDX-License-Identifier: Apache-2.0
"""What of `fedvitals bench gpu` can be tried without a GPU."""

import pytest
import torch

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.engines.site import Site
from fedvitals_studies.bench.gpu import bars as bench_gpu
from fedvitals_studies.bench.gpu.precision import errors
from fedvitals_studies.verbs.bench import BARS


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_step_in_float32_is_seven_digits_from_float64(model):
    site = Site.of(lab.Experiment(dataset="digits", model=model, clients=5))
    found = [*errors(site, torch.device("cpu"), "float32")]
    assert [error.plan for error in found] == {"mlp": ["dense", "mapped"], "cnn": ["mapped"]}[model]
    for error in found:
        assert 1e-8 < error.outputs < 1e-6
        assert 1e-8 < error.gradients < 1e-6


def test_coarser_numbers_show():
    site = Site.of(lab.Experiment(dataset="digits", model="mlp", clients=5))
    (error,) = errors(site, torch.device("cpu"), "bfloat16")
    assert error.outputs > 1e-4
    assert error.gradients > 1e-4


def test_parts_are_those_of_the_command():
    assert BARS["gpu"] == bench_gpu.PARTS
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="needs a CUDA device"):
            bench_gpu.bench_gpu()
