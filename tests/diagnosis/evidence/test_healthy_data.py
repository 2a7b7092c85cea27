# SPDX-License-Identifier: Apache-2.0
"""Healthy clients whose data are unlike normal ones: nobody is accused."""

import numpy as np
import pytest
import torch

from fedvitals.diagnosis.evidence.compared_data import compare_data
from fedvitals.diagnosis.evidence.described_data import DataSketches
from fedvitals.diagnosis.evidence.suspect_data import judge_data
from fedvitals.probes.data_sketch import describe
from fedvitals.records import Event, Where


def heavy_tails(stream, centres, _client):
    y = stream.integers(0, len(centres), 100)
    return np.exp(0.3 * centres[y] + 1.5 * stream.normal(size=(100, centres.shape[1]))), y


def different_units(stream, centres, _client):
    y = stream.integers(0, len(centres), 100)
    units = 10.0 ** np.linspace(-3, 4, centres.shape[1])
    return (centres[y] + stream.normal(size=(100, centres.shape[1]))) * units, y


def own_style(stream, centres, _client):
    own = centres + (0.5 if stream.random() < 0.8 else 1.5) * stream.normal(size=centres.shape)
    y = stream.integers(0, len(centres), 100)
    return own[y] + stream.normal(size=(100, centres.shape[1])), y


def repeated_samples(stream, centres, client):
    y = stream.integers(0, len(centres), 30 if client % 3 == 0 else 100)
    x = centres[y] + stream.normal(size=(len(y), centres.shape[1]))
    return (np.tile(x, (10, 1)), np.tile(y, 10)) if client % 3 == 0 else (x, y)


def frames_of_videos(stream, centres, _client):
    labels = stream.integers(0, len(centres), 6)
    scenes = centres[labels] + stream.normal(size=(6, centres.shape[1]))
    frames = np.repeat(scenes, 20, axis=0) + 0.3 * stream.normal(size=(120, centres.shape[1]))
    return frames, np.repeat(labels, 20)


@pytest.mark.parametrize("kind", [heavy_tails, different_units, own_style, repeated_samples, frames_of_videos])
def test_nobody_is_accused(kind):
    for seed in range(8):
        stream = np.random.default_rng(seed)
        centres = stream.normal(size=(5, 32))
        events = []
        for client in range(10):
            x, y = kind(stream, centres, client)
            told = describe(torch.tensor(np.asarray(x, np.float32)), torch.tensor(y), len(y)).remark(0)
            events.append(Event(Where("", 0, f"c{client}"), 0.0, "info", *told))
        sketches = DataSketches()
        sketches.update(events)
        examined = judge_data(sketches, [*sketches.newest], compare_data(sketches.newest))
        assert examined.suspects == {}, seed
