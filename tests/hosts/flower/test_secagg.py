# SPDX-License-Identifier: Apache-2.0
"""Flower's own secure aggregation, SecAgg+ with all its stages, watched: it works as before, and hides what it hid."""

import numpy as np
import pytest
from flwr.client.mod import secaggplus_mod

import fedvitals as fv
from fedvitals.catalog import level_of
from fedvitals.records import LayerStats, Metric, Run, Sketch, Span
from fedvitals.time_parts import ROUND
from support.conditions import holds_for_each
from support.flower.federation import watched
from support.flower.legacy import NODES
from support.flower.secure_aggregation import run

ROUNDING = 1e-3  # of what is masked as whole numbers, at random


@pytest.mark.thorough
@pytest.mark.parametrize("on_grid", [False, True])
def test_the_sum_is_the_same_and_nothing_of_a_single_client_is_kept(on_grid, caplog):
    alone = run(secaggplus_mod)
    with watched(detectors="standard") as (monitor, sink):
        seen = run(fv.flower.client_mod(privacy=3), secaggplus_mod, monitor=monitor, on_grid=on_grid)
    assert holds_for_each(np.allclose(a, b, atol=ROUNDING) for a, b in zip(alone, seen, strict=True))
    assert "privacy level 3 is refused: with secaggplus_mod" in caplog.text
    assert [span.where.round for span in sink.of(Span, ROUND)] == [1, 2]
    single = [r for r in sink.records if not isinstance(r, Run) and r.where.node in NODES]
    assert not [r for r in single if isinstance(r, LayerStats | Sketch)]
    assert not {r.name for r in single if isinstance(r, Metric) and level_of(r) > 1}
    assert {r.where.node for r in single if isinstance(r, Span)} == NODES
    assert len([e for e in sink.events("cohort") if {*e.data["answered"]} == NODES]) == 4
    assert not sink.events("telemetry.refused")
