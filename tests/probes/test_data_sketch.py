# SPDX-License-Identifier: Apache-2.0
"""The description of a client's own samples."""

import numpy as np
import pytest
import torch

import fedvitals as fv
from fedvitals.probes.data_sketch import DIMENSIONS, describe
from fedvitals.testing import MemorySink

STREAM = torch.Generator().manual_seed(0)


def samples(count=40, shape=(8, 8), classes=4):
    return torch.randn(count, *shape, generator=STREAM), torch.arange(count) % classes


def test_means_and_covariance_are_those_of_the_projected_samples():
    x, y = samples(60, (5, 10))
    event = describe(x, y, 60).event
    signs = np.random.default_rng(50).integers(0, 2, (50, DIMENSIONS)) * 2.0 - 1
    projected = x.reshape(60, 50).double().numpy() @ signs / np.sqrt(50)
    labels = y.numpy()
    assert event["classes"] == [0, 1, 2, 3]
    assert event["counts"] == [15] * 4
    expected = np.stack([projected[labels == label].mean(0) for label in range(4)])
    np.testing.assert_allclose(event["means"], expected, rtol=2e-3, atol=1e-4)
    residuals = projected - expected[labels]
    covariance = (residuals.T @ residuals / 56)[np.triu_indices(DIMENSIONS)]
    np.testing.assert_allclose(event["covariance"], covariance, rtol=6e-3, atol=1e-4)
    np.testing.assert_allclose(
        event["spreads"], [(residuals[labels == c] ** 2).sum() / 14 for c in range(4)], rtol=2e-3
    )


def test_patches_of_images_are_told_whatever_their_brightness_contrast_and_order_of_axes():
    x, y = samples(60, (3, 12, 12))
    plain, lit, last = (describe(own, y, 60).event for own in (x, 3 * x + 5, x.permute(0, 2, 3, 1)))
    assert np.shape(plain["means"]) == (4, 2 * DIMENSIONS)
    patches, same, permuted = (np.array(own["means"])[:, DIMENSIONS:] for own in (plain, lit, last))
    np.testing.assert_allclose(same, patches, rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(permuted, patches, rtol=2e-3, atol=1e-4)
    swapped = np.array(describe(x.flip(3), y, 60).event["means"])[:, DIMENSIONS:]
    assert not np.allclose(swapped, patches, rtol=0.01)


@pytest.mark.parametrize("shape", [(1, 8, 8), (12, 12), (9, 12, 12)])
def test_what_is_no_image_or_a_tiny_one_has_no_patches(shape):
    x, y = samples(60, shape)
    assert np.shape(describe(x, y, 60).event["means"]) == (4, DIMENSIONS)


def test_few_features_are_told_as_they_are():
    x, y = samples(40, (3,))
    event = describe(x, y, 40).event
    np.testing.assert_allclose(event["means"][0], x[y == 0].mean(0), rtol=2e-3, atol=1e-4)


def test_scalars_are_those_of_all_inputs():
    x, y = samples()
    x[0, 0, 0], x[:, 1, 1] = torch.nan, 2.0
    x[5] = x[4]
    metrics = describe(x, y, 40).metrics
    finite = x[~x.isnan()]
    assert metrics["data.mean"] == pytest.approx(float(finite.mean()), rel=1e-5)
    assert metrics["data.std"] == pytest.approx(float(finite.std(correction=0)), rel=1e-5)
    assert metrics["data.missing"] == pytest.approx(1 / x.numel())
    assert metrics["data.constant"] == pytest.approx(1 / 64)
    assert metrics["data.duplicates"] == pytest.approx(1 / 40)


def test_classes_of_few_samples_are_withheld():
    x, _ = samples(43)
    y = torch.cat([torch.zeros(40), torch.ones(3)]).long()
    assert describe(x, y, 43).event["classes"] == [0]


@pytest.mark.parametrize("labels", [torch.randn(40), torch.randint(0, 2, (40, 3)), None])
def test_targets_that_are_no_classes_make_one_class(labels):
    event = describe(samples()[0], labels, 40).event
    assert not event["labelled"]
    assert event["counts"] == [40]


def test_tokens_are_counted_and_not_taken_for_numbers():
    x = torch.randint(1, 900, (40, 12), generator=STREAM)
    x[:, 6:] = 0
    description = describe(x, torch.arange(40) % 2, 40)
    assert description.event["tokens"]
    assert {*description.metrics} == {"data.length", "data.duplicates", "data.within_classes"}
    assert (description.metrics["data.length"], description.metrics["data.duplicates"]) == (6.0, 0.0)


def test_too_few_samples_are_not_described():
    assert describe(*samples(3), 3) is None


def test_what_may_leave_depends_on_the_privacy_level():
    told = {}
    for level in (1, 2, 3):
        sink = MemorySink()
        x, y = samples()
        with fv.Monitor(None, sinks=[sink], privacy=level, strict=True) as monitor, monitor.round(0):
            model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))
            with monitor.client("c0", model, data=(x, y), loss=torch.nn.functional.cross_entropy):
                pass
        told[level] = {key for event in sink.events("data") for key in event.data}
    assert not told[1]
    scalars = {"mean", "std", "std_error", "missing", "constant", "duplicates", "within_classes"}
    assert told[2] == {"samples", "features", "looks", *scalars}
    assert {"means", "covariance", "inputs", "labels", "min", "max"} <= told[3]


def test_columns_of_a_table_have_quartiles_and_numbers_out_of_range():
    x, y = samples(200, (6,))
    x[:10, 2], x[0, 3] = -999.0, torch.nan
    x[:, 4] = 1.0  # has no width, so nothing is out of its range
    description = describe(x, y, 200)
    assert description.metrics["data.out_of_range"] == pytest.approx(10 / x.numel())
    wanted = np.quantile(torch.nan_to_num(x).numpy(), [0.25, 0.5, 0.75], axis=0)
    *quartiles, spreads = description.event["columns"]
    np.testing.assert_allclose(quartiles, wanted, rtol=2e-3, atol=1e-4)
    own = x[y == 0, 0] - x[y == 0, 0].mean()
    assert spreads[0] == pytest.approx(float(own.square().mean().sqrt()), rel=0.3)
    assert spreads[4] == 0
    assert "columns" not in describe(x[:20], y[:20], 20).event  # they would be those of single samples
    images = describe(*samples(200, (1, 2, 3)), 200)
    assert "data.out_of_range" not in images.metrics


def test_quartiles_leave_a_client_with_the_means_only():
    told = {}
    for level in (2, 3):
        sink = MemorySink()
        own = {"data": samples(200, (6,)), "loss": torch.nn.CrossEntropyLoss()}
        monitor = fv.Monitor(None, sinks=[sink], privacy=level, strict=True)
        with monitor, monitor.round(0), monitor.client("c0", torch.nn.Linear(6, 4), **own):
            pass
        told[level] = {key for event in sink.events("data") for key in event.data}
    assert {"columns", "out_of_range"} <= told[3]
    assert "out_of_range" in told[2]
    assert "columns" not in told[2]


@pytest.mark.parametrize(("apart", "share"), [(0.0, 1.0), (1.0, 0.5), (3.0, 0.1)])
def test_the_spread_within_classes_is_a_share_of_all(apart, share):
    y = torch.arange(2000) % 2
    x = torch.randn(2000, 5, generator=STREAM) + apart * (2 * y - 1)[:, None]
    assert describe(x, y, 2000).metrics["data.within_classes"] == pytest.approx(share, abs=0.03)
    assert "data.within_classes" not in describe(x, torch.zeros(2000).long(), 2000).metrics
