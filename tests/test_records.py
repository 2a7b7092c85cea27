# SPDX-License-Identifier: Apache-2.0
"""The vocabulary: what adds up, what is refused, what a full queue must keep."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedvitals.errors import RecordError
from fedvitals.measurements import is_important, run_of, stamped
from fedvitals.records import (
    Action,
    Event,
    Finding,
    Layer,
    LayerStats,
    LayerTable,
    Metric,
    Run,
    Sketch,
    Snapshot,
    Span,
    Transfer,
    Truth,
    Where,
)
from fedvitals.stats import empty_sums

HERE = Where("run-1", round=3, node="c1", step=5, group="edge-2")


def stats_at(
    where: Where, *, family: str = "gradient", table: str = "t", at: float = 1.0, count: float = 4
) -> LayerStats:
    matrix = empty_sums(2)
    matrix[:, 0] = count
    return LayerStats(where, at, family, matrix, table)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (HERE, HERE),
        (dataclasses.replace(HERE, step=6), dataclasses.replace(HERE, step=None)),
        (dataclasses.replace(HERE, node="c2"), dataclasses.replace(HERE, node=None)),
        (Where("run-1", round=4, node="c2", step=5, group="edge-1"), Where("run-1", step=5)),
        (Where("run-1"), Where("run-1")),
    ],
    ids=["same", "steps to client-round", "clients to edge", "rounds", "with the whole"],
)
def test_a_sum_stands_at_the_coordinates_that_both_share(there, expected):
    both = stats_at(HERE, at=1.0, count=4) + stats_at(there, at=2.0, count=6)
    assert both.where == expected
    assert both.at == 2.0
    np.testing.assert_array_equal(both.get("count"), [10, 10])
    assert (both.source, both.sequence) == ("", 0)  # a new record, with no identity yet


def test_statistics_of_different_things_do_not_add():
    with pytest.raises(RecordError, match="'gradient' of layer table t with 'weight' of t"):
        stats_at(HERE) + stats_at(HERE, family="weight")
    with pytest.raises(RecordError, match="only statistics of the same family and the same layers"):
        stats_at(HERE) + stats_at(HERE, table="u")
    with pytest.raises(RecordError, match="of run 'run-1' with those of run 'run-2'"):
        stats_at(HERE) + stats_at(Where("run-2"))


@pytest.mark.parametrize("shape", [(9,), (2, 8), (1, 2, 9)])
def test_a_matrix_of_wrong_shape_is_refused(shape):
    with pytest.raises(RecordError, match=r"need shape \[layers, 9\], got "):
        LayerStats(HERE, 0.0, "gradient", np.zeros(shape), "t")


def test_an_unknown_family_is_refused():
    with pytest.raises(RecordError, match=r"Unknown family 'gradients'\. Known: gradient, "):
        LayerStats(HERE, 0.0, "gradients", np.zeros((2, 9)), "t")


def test_the_digest_of_a_layer_table_names_its_content():
    layers = (Layer("conv.weight", (8, 1, 3, 3), "float32"), Layer("conv.bias", (8,), "float32"))
    table = LayerTable("parameter", layers)
    assert table.digest == LayerTable("parameter", layers).digest
    assert table.digest != LayerTable("buffer", layers).digest
    assert table.digest != LayerTable("parameter", layers[:1]).digest
    assert table.names == ("conv.weight", "conv.bias")


def event(level: str) -> Event:
    return Event(HERE, 0.0, level, "log", "text")


@pytest.mark.parametrize(
    ("record", "important"),
    [
        (Run("run-1", "digits"), True),
        (Finding(HERE, 0.0, "nan", "critical", 0.9, "NaN"), True),
        (Action(HERE, 0.0, "nan", "exclude", "c1"), True),
        (Snapshot(HERE, 0.0, "global", "abc", 10), True),
        (Truth(HERE, 0.0, "label_noise"), True),
        (event("critical"), True),
        (event("error"), True),
        (event("warning"), True),
        (event("info"), False),
        (event("debug"), False),
        (Metric(HERE, 0.0, "loss", 1.0), False),
        (stats_at(HERE), False),
        (Span(HERE, 0.0, "round", 1.0, "t", "s"), False),
        (Transfer(HERE, 0.0, "c1", "server", 10, 20), False),
        (Sketch(HERE, 0.0, (1.0,)), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_full_queue_must_keep(record, important):
    assert is_important(record) is important
    assert run_of(record) == "run-1"


def test_stamped_gives_an_identity_and_changes_nothing_else():
    metric = Metric(HERE, 1.0, "loss", 0.5)
    identified = stamped(metric, "pid-1", 7)
    assert identified == Metric(HERE, 1.0, "loss", 0.5, "pid-1", 7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        metric.sequence = 8
