# SPDX-License-Identifier: Apache-2.0
"""Updates in whatever form a loop has them, with no model anywhere: measured alike, and the faulty ones found."""

import numpy as np
import pytest
import torch

from fedvitals.records import LayerStats, Run
from support.models import make, watched

NODES = [f"c{i}" for i in range(6)]
FORMS = {
    "list of arrays": lambda d: [*d.values()],
    "mapping of arrays": lambda d: d,
    "list of tensors": lambda d: [torch.tensor(v) for v in d.values()],
    "mapping of tensors": lambda d: {name: torch.tensor(v) for name, v in d.items()},
    "flat array": lambda d: np.concatenate([v.ravel() for v in d.values()]),
    "flat tensor": lambda d: torch.cat([torch.tensor(v).flatten() for v in d.values()]),
    "lists of numbers": lambda d: [v.tolist() for v in d.values()],
}


def updates_of(number, scale=0.3):
    """One direction that all clients share, and noise of their own."""
    stream = np.random.default_rng(number)
    shared = {"W": stream.normal(size=(20, 4)), "b": stream.normal(size=4)}
    return {node: {k: v + scale * stream.normal(size=v.shape) for k, v in shared.items()} for node in NODES}


def run(form, alter=lambda number, update: update, rounds=7):
    monitor, sink = watched()
    sent = {}
    with monitor:
        for number in range(rounds):
            with monitor.round(number):
                own = updates_of(number)
                own["c3"] = {name: alter(number, values) for name, values in own["c3"].items()}
                monitor.updates(number, {node: form(update) for node, update in own.items()})
            sent[number] = own
    return monitor, sink, sent


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_is_measured_alike(form):
    _, sink, sent = run(form, rounds=2)
    for node, update in sent[1].items():
        norm = np.sqrt(sum(float(np.square(v).sum()) for v in update.values()))
        assert sink.value("update.norm", node=node, round=1) == pytest.approx(norm, rel=1e-6)
        assert sink.metrics("update.cosine_mean", node=node, round=1)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("factor", [-1.0, -5.0, 10.0])
def test_scaled_and_reversed_updates_are_found_without_a_model(form, factor):
    monitor, _, _ = run(form, lambda number, values: values * (factor if number > 3 else 1.0))
    found = [(f.issue, f.where.node, f.evidence["since"]) for f in monitor.findings()]
    assert ("BYZANTINE", "c3", 4) in found
    assert {node for _, node, _ in found} == {"c3"}


def test_healthy_updates_without_a_model_are_left_alone():
    monitor, _, _ = run(FORMS["flat array"], rounds=12)
    assert not monitor.findings()


def test_one_odd_round_is_nothing():
    monitor, _, _ = run(FORMS["flat array"], lambda number, values: values * (10.0 if number == 4 else 1.0))
    assert not monitor.findings()


def test_layers_have_the_names_of_the_mapping_or_numbers():
    for form, names in (("mapping of arrays", ["W", "b"]), ("list of tensors", ["layer 0", "layer 1"])):
        _, sink, _ = run(FORMS[form], rounds=1)
        tables = {table.digest: table for table in sink.of(Run)[-1].tables}
        used = {record.table for record in sink.of(LayerStats) if record.family == "update"}
        assert [[layer.name for layer in tables[digest].layers] for digest in used] == [names]


def test_mappings_and_vectors_are_told_apart_by_the_layers_of_the_model():
    """A state's difference has buffers too, and another order; a flat vector is cut into the model's layers."""
    model = make("mlp")
    deltas = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    shuffled = {"running_mean": torch.full((3,), 1e6), **dict(reversed(deltas.items()))}
    flat = torch.cat([d.flatten() for d in deltas.values()])
    rows = []
    for update in ([*deltas.values()], shuffled, flat, flat.numpy()):
        monitor, sink = watched()
        with monitor, monitor.round(0, model):
            monitor.updates(0, {"a": update, "b": update})
        rows.append(next(r.matrix for r in sink.of(LayerStats) if r.family == "update" and r.where.node == "a"))
    assert all(np.allclose(own, rows[0]) for own in rows[1:])
    assert len(rows[0]) == len(deltas)


def test_who_sends_no_numbers_costs_only_itself():
    monitor, sink = watched(strict=False)
    with monitor, monitor.round(0):
        monitor.updates(0, {"a": [np.ones(3)], "b": "no update", "c": [np.array(["x"])], "d": 5, "e": [np.ones(3)]})
    assert {r.where.node for r in sink.metrics("update.norm")} == {"a", "e"}
    assert {e.where.node for e in sink.events("monitor.error")} == {"b", "c", "d"}


@pytest.mark.filterwarnings("error")
def test_memory_that_cannot_be_written_to_is_read_all_the_same():
    array = np.arange(4.0)
    array.flags.writeable = False
    monitor, sink = watched()
    with monitor, monitor.round(0):
        monitor.updates(0, {"a": [array], "b": [array[::-1]], "c": [array.astype(">f4")]})
    assert [m.value for m in sink.metrics("update.norm")] == pytest.approx([14**0.5] * 3)
