# SPDX-License-Identifier: Apache-2.0
"""The study's watcher of arrays against the monitor's records: the same series, from the same training."""

import dataclasses

import numpy as np
import pytest
import torch

from fedvitals import lab
from fedvitals.kernels import sums
from fedvitals.monitor.monitor import Monitor
from fedvitals_studies.reproduce import measure as measuring
from fedvitals_studies.reproduce.conditions import BY_NAME, richly
from fedvitals_studies.reproduce.observer import Watch
from support.conditions import holds_for_each

SMALL = {"clients": 6, "rounds": 2, "iterations": 3, "dataset": "digits", "channels": (3, 4)}


def both(condition, **wanted):
    """The two watchers' series, on stacked clients with the same images."""
    experiment = measuring.experiment_of(condition, 0)
    tally = measuring.CohortSums(condition)
    with Monitor(None, run="study", probes=measuring.probes_of(condition), sinks=[tally], host="lab") as m:
        result = lab.run(experiment, m, engine="stacked", workers=1)
        m.flush()
    watch = Watch(dataclasses.replace(measuring.wanted_of(condition, 1), **wanted))
    again = lab.run(experiment, watch, engine="stacked", workers=1)
    assert [r.metrics for r in result.rounds] == [r.metrics for r in again.rounds], "watching changes the training"
    return tally.series(), watch.series()


def flat(series):
    found = {}
    for name, values in series.items():
        for key, part in values.items() if isinstance(values, dict) else [("", values)]:
            found[f"{name}/{key}"] = np.array(part, float)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["extended-hierarchical-baseline", "extended-centralized-exploding"])
def test_arrays_give_the_series_that_records_give(name, monkeypatch):
    condition = dataclasses.replace(richly(BY_NAME[name]), **SMALL)
    monkeypatch.setattr(
        measuring, "topology_of", lambda c: lab.Hierarchical(edges=2) if "hier" in name else lab.Centralized()
    )
    records, arrays = (flat(s) for s in both(condition, images=measuring.IMAGES, images_each=measuring.IMAGES_EACH))
    if "hier" not in name:  # without edges records have no place for what belongs to the cohort
        arrays = {key: values for key, values in arrays.items() if not key.endswith("/all")}
    assert set(records) == set(arrays)
    for key, values in records.items():
        assert len(values)
        # A layer's signed mean is a difference of large numbers: its rounding goes by their size.
        size = np.nanmax(records.get(key.replace(".mean/", ".magnitude/"), values), initial=0)
        np.testing.assert_allclose(arrays[key], values, rtol=1e-6, atol=1e-7 * size, err_msg=key)
    assert np.isfinite(arrays["iteration.gsc/"]).all()


class Recorded(Watch):
    """As of a host that keeps the sums of the gradients itself, as on a GPU."""

    def stack_begin(self, stack):
        self.rows = []
        super().stack_begin(dataclasses.replace(stack, sums=lambda: torch.stack(self.rows)))

    def stack_step(self, step, gradients, losses):
        self.rows.append(torch.as_tensor(sums(self._open.model.layers(gradients), clients=True)))
        super().stack_step(step, gradients, losses)


def test_sums_that_the_host_keeps_are_taken_from_it():
    condition = dataclasses.replace(BY_NAME["sensitivity-kernel-hierarchical-unclipped"], **SMALL)
    experiment = measuring.experiment_of(condition, 0)
    found = []
    for kind in (Watch, Recorded):
        watch = kind(measuring.wanted_of(condition, 0))
        lab.run(experiment, watch, engine="stacked", workers=1)
        found.append(flat(watch.series()))
    assert "iteration.gsc/" not in found[0]  # of the paper's own conditions only
    assert holds_for_each(np.array_equal(values, found[1][key], equal_nan=True) for key, values in found[0].items())
