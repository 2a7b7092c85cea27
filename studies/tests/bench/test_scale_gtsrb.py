# SPDX-License-Identifier: Apache-2.0
"""The paper's three scenarios on real traffic signs: told apart by the gradient scale."""

import pytest
import torch

from fedvitals.probes.scale import gradient_scale
from fedvitals_studies.bench import gtsrb
from fedvitals_studies.bench.gsc import trained

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def signs():
    if gtsrb.folder() is None:
        pytest.skip("GTSRB is not here (FEDVITALS_DATA or ../shared/data)")
    return gtsrb.load(images=313)


def test_vanishing_baseline_exploding_in_this_order(signs):
    """Vanishing is exactly 0, baseline of the order of 1, exploding many orders above; sensitivity orders otherwise."""
    x, y = signs
    found = {}
    for scenario in ("vanishing", "baseline", "exploding"):
        model = trained(x, y, rounds=1, scenario=scenario)
        gsc, sensitivity = gradient_scale(model, x[:16])
        found[scenario] = (float(gsc.mean()), float(sensitivity.mean()))
    assert found["vanishing"][0] == 0
    assert 1e-4 < found["baseline"][0] < 1e2
    assert found["exploding"][0] > 1e6
    assert found["exploding"][1] < found["baseline"][1]  # the other reading does not give the paper's order


def test_the_estimate_is_within_two_percent_of_exact_on_the_same_images(signs):
    """After two rounds of training, 16 images: mean over several draws of the absolute error."""
    x, y = signs
    model = trained(x, y, rounds=2)
    exact = float(gradient_scale(model, x[:16], exact=True)[0].mean())
    errors = [abs(float(gradient_scale(model, x[:16], seed=s)[0].mean()) / exact - 1) for s in range(10)]
    assert float(torch.tensor(errors).mean()) < 0.02


def test_packed_images_are_those_of_the_benchmark(signs):
    """Pixels from 0 to 1, 43 classes, and the file unpacks to real images: neighbours resemble each other."""
    x, y = signs
    assert x.shape == (313, 3, 32, 32)
    assert 0 <= float(x.min()) <= float(x.max()) <= 1
    assert int(y.max()) < 43
    assert float((x[..., 1:] - x[..., :-1]).abs().mean()) < 0.1
