# SPDX-License-Identifier: Apache-2.0
"""Histories in which anything may be missing, zero, infinite or not a number: no detector stumbles, none warns."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from fedvitals import lab
from fedvitals.diagnosis.examine import DETECTORS, examine
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Event, LayerStats, Metric
from fedvitals.store import MemoryStore
from fedvitals.testing import MemorySink

ODD = (math.nan, math.inf, -math.inf, 0.0, 1e300, -1.0)


def with_running_statistics():
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10))


@functools.cache
def records():
    """Of a real federation, with a network and a model that has running statistics; eight clients, five rounds."""
    sink = MemorySink()
    experiment = lab.Experiment(
        dataset=lab.synthetic(samples=400, features=8),
        model=lab.Own(with_running_statistics),
        clients=8,
        rounds=5,
        local=lab.Local(iterations=2),
        network=lab.Network(links="fibre", devices="laptop"),
    )
    with Monitor(None, host="lab", sinks=[sink], detectors=(), strict=True) as monitor:
        lab.run(experiment, monitor)
    return sink.records, monitor.run.id


def changed(record, share, rng):
    """The record with some of its numbers spoilt."""
    if isinstance(record, Metric) and rng.random() < share:
        return replace(record, value=float(rng.choice(ODD)))
    if isinstance(record, LayerStats):
        matrix = np.array(record.matrix)
        spoilt = rng.random(matrix.shape) < share
        with np.errstate(over="ignore"):  # 1e300 is infinite in 32 bits
            matrix[spoilt] = rng.choice(ODD, int(spoilt.sum()))
        return replace(record, matrix=matrix)
    return record


def spoilt(share, gone, seed):
    told, run = records()
    rng = np.random.default_rng(seed)
    store = MemoryStore()
    kept = [r for r in told if not isinstance(r, Metric | LayerStats | Event) or rng.random() >= gone]
    store.write([changed(r, share, rng) for r in kept])
    return store.history(run)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("share", "gone"), [(0.02, 0.0), (0.3, 0.3), (1.0, 0.0), (0.0, 0.5), (0.0, 0.95)])
def test_no_detector_stumbles(share, gone, seed):
    """Whatever it says: warnings are errors here, and so is anything that it raises."""
    for found in examine(spoilt(share, gone, seed), detectors=DETECTORS):
        assert 0 <= found.confidence <= 1


@pytest.mark.thorough
@pytest.mark.parametrize("value", ODD)
def test_a_cohort_in_which_all_are_equal(value):
    """Every spread is 0, every comparison a tie, and nobody stands out."""
    told, run = records()
    store = MemoryStore()
    alike = [
        replace(r, value=value)
        if isinstance(r, Metric) and r.where.node is not None
        else replace(r, matrix=np.full_like(r.matrix, np.float32(value) if abs(value) < 1e30 else math.inf))
        if isinstance(r, LayerStats) and not math.isnan(value)
        else r
        for r in told
    ]
    store.write(alike)
    examine(store.history(run), detectors=DETECTORS)
