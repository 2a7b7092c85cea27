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
    images = {"images": measuring.IMAGES, "images_each": measuring.IMAGES_EACH}
    sparing = {"full_gradient": measuring.NLC_ROUNDS, "full_gradient_each": (), "test_loss": False}
    records, arrays = (flat(s) for s in both(condition, **images, **sparing))
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
        watch = kind(dataclasses.replace(measuring.wanted_of(condition, 0), test_loss=False))
        lab.run(experiment, watch, engine="stacked", workers=1)
        found.append(flat(watch.series()))
    assert "iteration.gsc/" not in found[0]  # of the paper's own conditions only
    assert holds_for_each(np.array_equal(values, found[1][key], equal_nan=True) for key, values in found[0].items())


class Edges(Watch):
    """Keeps each edge's mean model after every iteration, the one that the round starts from first."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.models = []

    def _test(self, open_):
        groups = np.array(open_.stack.groups)
        self.models.append(
            {g: open_.stack.states[torch.tensor(groups == g)].double().mean(0).float() for g in sorted({*groups})}
        )
        super()._test(open_)


@pytest.mark.parametrize("batches", [1, 3])
def test_after_each_iteration_an_edges_model_is_tested_on_its_clients_local_tests(batches):
    condition = dataclasses.replace(BY_NAME["initial-hierarchical-unclipped"], **SMALL, batches=batches)
    experiment = measuring.experiment_of(condition, 0)
    site = lab.Site.of(experiment)
    watch = Edges(measuring.wanted_of(condition, 0), measuring.local_tests(experiment, None))
    lab.run(experiment, watch, engine="stacked", workers=1)
    series = watch.series()
    assert len(watch.models) == 2 * (1 + 3)
    for edge, nodes in site.groups.items():
        rows = torch.cat([site.shards[node].test for node in nodes])
        x, y = site.dataset.pairs(site.dataset.x[rows], site.dataset.y[rows])
        losses = []
        for models in watch.models:
            site.layout.load(site.module, models[edge])
            losses.append(float(torch.nn.functional.cross_entropy(site.module.eval()(x).double(), y).detach()))
        tested = np.reshape(losses, (2, 4))
        np.testing.assert_allclose(series["start.test_loss"][edge], tested[:, 0], rtol=1e-5)
        np.testing.assert_allclose(series["iteration.test_loss"][edge], tested[:, 1:].ravel(), rtol=1e-5)
        starts = [models[edge] for models in watch.models[::4]]
        assert torch.equal(starts[1], watch.models[4][edge])
        assert not torch.equal(watch.models[3][edge], starts[1])  # the server has averaged the edges
    assert len(series["iteration.difference"]["edge-0"]) == 2 * 3


def test_the_whole_set_has_its_gradient_at_every_iteration_of_two_rounds_in_five():
    condition = dataclasses.replace(BY_NAME["extended-hierarchical-exploding"], **{**SMALL, "rounds": 6})
    wanted = dataclasses.replace(measuring.wanted_of(condition, 1), images=0, images_each=0, nonlinearity=0)
    watch = Watch(wanted, measuring.local_tests(measuring.experiment_of(condition, 0), None))
    lab.run(measuring.experiment_of(condition, 0), watch, engine="stacked", workers=1)
    series = watch.series()
    measured = np.isfinite(np.array(series["iteration.gradient.full.mean"]["1"])).reshape(6, 3)
    assert measured.all(1).tolist() == [True, False, False, False, True, True]
    assert not measured[1:4].any()
    assert np.isfinite(series["gradient.full.mean"]["1"]).all()
