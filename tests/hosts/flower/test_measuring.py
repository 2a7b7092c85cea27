# SPDX-License-Identifier: Apache-2.0
"""Updates are measured beside the server: a reply does not wait for it, the end of its round does."""

import threading

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg

from fedvitals.hosts.background_work import BackgroundWork
from fedvitals.hosts.flower.known_models import KnownModels
from fedvitals.probes.array_difference import ArrayDifference
from fedvitals.records import LayerStats
from support.flower.federation import RUNS, client_app, federate, model, watched


def test_work_is_done_in_order_and_waited_for_once():
    done, go, work = [], threading.Event(), BackgroundWork("measuring")
    work.submit(lambda: (go.wait(10), done.append(1)))
    work.submit(lambda: 1 / 0)
    work.submit(lambda: done.append(threading.current_thread().name))
    assert not done
    go.set()
    work.wait()
    assert done[0] == 1
    assert done[1].startswith("measuring")
    work.wait()
    work.submit(lambda: done.append(2))
    work.wait()
    assert done[2] == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("measuring")]


def measured(memory):
    """The model, and of each round and client the norm, the cosine to the others, and the sums of layers."""
    with watched(update_memory=memory) as (monitor, sink):
        result, _ = federate(FedAvg(), client_app(), monitor, run_id=next(RUNS), rounds=3)
    values = {
        (metric.where.round, metric.where.node, metric.name): metric.value
        for metric in sink.metrics()
        if metric.name.startswith("update.")
    }
    rows = {
        (record.where.round, record.where.node): record.matrix
        for record in sink.records
        if isinstance(record, LayerStats) and record.family == "update"
    }
    return result.arrays, values, rows


@pytest.mark.parametrize("memory", [1 << 20, 0], ids=["exact", "by sketches"])
def test_every_update_is_measured_before_its_round_ends(memory, monkeypatch):
    threads, subtract = set(), ArrayDifference._subtract

    def noted(self, *arguments):
        threads.add(threading.current_thread())
        subtract(self, *arguments)

    monkeypatch.setattr(ArrayDifference, "_subtract", noted)
    _, values, _ = measured(memory)
    expected = {(number, str(node)) for number in (1, 2, 3) for node in range(100, 104)}
    for name in ("update.norm", "update.cosine_mean"):
        assert {key[:2] for key in values if key[2] == name} == expected
    assert threading.main_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)


def test_updates_of_two_rounds_that_fit_into_memory_are_compared_exactly():
    size, clients = 4 * 40, 4  # bytes of the model
    (_, exact, _), (_, fitting, _), (_, estimated, _) = (
        measured(memory) for memory in (1 << 20, (2 * clients + 1) * size, 2 * clients * size)
    )
    assert fitting == exact
    assert estimated != exact


def test_piece_by_piece_the_numbers_are_the_same():
    (start, exact, rows), (same, pieces, again) = measured(1 << 20), measured(0)
    assert [array.data for array in start.values()] == [array.data for array in same.values()]
    norms = [key for key in exact if key[2] == "update.norm"]
    assert [pieces[key] for key in norms] == pytest.approx([exact[key] for key in norms], rel=1e-6)
    assert rows.keys() == again.keys()
    for key in rows:
        np.testing.assert_allclose(rows[key], again[key], rtol=1e-6, atol=1e-7)
    cosines = [key for key in exact if key[2] in ("update.cosine_mean", "update.cosine_previous")]
    assert [pieces[key] for key in cosines] == pytest.approx([exact[key] for key in cosines], abs=0.3)


def test_an_outline_has_the_values_of_the_model_that_it_was_last_asked_for():
    models, records = KnownModels(None), [model(seed) for seed in range(3)]
    for number in (0, 0, 1, 1, 0, 2):
        outline = models.outline(records[number])
        for name, parameter in outline.named_parameters():
            np.testing.assert_array_equal(np.asarray(parameter), records[number][name].numpy())
        if number == 1:
            models.forget()
