# SPDX-License-Identifier: Apache-2.0
"""Updates as the server sees them, against plain float64 arithmetic on copies of the models."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedvitals.errors import ConfigError
from fedvitals.kernels import sums
from fedvitals.kernels.sketch import COSINE_ERROR, VERSION, count_sketch
from fedvitals.probes import numpy_updates
from fedvitals.probes import updates as updates_module
from fedvitals.probes.backends import make_instruments
from fedvitals.probes.numpy_updates import ArrayUpdates
from fedvitals.probes.updates import UpdateTracker
from fedvitals.records import Sketch
from fedvitals.stats import ALIGNMENT_COLUMNS
from support.models import MODELS, close, flat, make, make_data, train, watched

MEAN, PREVIOUS, SHARE = range(3)


def cosine(a, b) -> float:
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm()))


def layers_of(vector, model):
    return vector.split([p.numel() for p in model.parameters()])


def federation(monitor, name, *, clients=4, rounds=2, tamper=lambda number, client, model: None):
    """Trains, and returns each client's update in each round, as float64 vectors."""
    updates = {}
    with monitor:
        for number in range(rounds):
            shared = make(name, seed=number)
            with monitor.round(number, shared):
                for client in range(clients):
                    model = copy.deepcopy(shared)
                    with monitor.client(f"c{client}", model):
                        train(model, torch.optim.SGD(model.parameters(), 0.2), make_data(seed=client), 3)
                        with torch.no_grad():
                            tamper(number, client, model)
                    updates[number, client] = flat(model) - flat(shared)
    return updates


@pytest.mark.parametrize("probes", ["light", "standard", "deep"])
@pytest.mark.parametrize("name", MODELS)
def test_norm_and_cosine_to_the_others(name, probes):
    """Each client's norm, and its cosine to the mean of all others' updates: its own part is left out."""
    monitor, sink = watched(probes)
    updates = federation(monitor, name)
    for (number, client), own in updates.items():
        others = sum(u for (n, c), u in updates.items() if n == number and c != client)
        place = {"node": f"c{client}", "round": number}
        close(sink.value("update.norm", **place), float(own.norm()), 1e-4)
        close(sink.value("update.cosine_mean", **place), cosine(own, others), 1e-3)
    assert not {"update.zero", "update.duplicates"} & sink.names()


@pytest.mark.parametrize("name", MODELS)
def test_cosines_and_shares_of_every_layer(name):
    """Per layer: cosine to the others, to the client's own previous update, and share of the squared norm."""
    monitor, sink = watched()
    updates = federation(monitor, name, clients=3)
    model = make(name)
    for client in range(3):
        own = updates[1, client]
        others, past = sum(updates[1, c] for c in range(3) if c != client), updates[0, client]
        place = {"node": f"c{client}", "round": 1}
        close(sink.value("update.cosine_previous", **place), cosine(own, past), 1e-3)
        found = sink.layers("update.alignment", **place).matrix
        pieces = zip(layers_of(own, model), layers_of(others, model), layers_of(past, model), strict=True)
        for row, (mine, theirs, before) in zip(found, pieces, strict=True):
            if mine.norm() > 1e-5:  # a bias before batch norm moves by rounding only
                close(row[[MEAN, PREVIOUS]], [cosine(mine, theirs), cosine(mine, before)], 2e-3)
            close(row[SHARE], float((mine @ mine) / (own @ own)), 1e-3)
        assert found[:, SHARE].sum() == pytest.approx(1)
    first = sink.layers("update.alignment", node="c0", round=0).matrix
    assert np.isnan(first[:, PREVIOUS]).all()
    assert len(ALIGNMENT_COLUMNS) == 3


@pytest.mark.parametrize("probes", ["light", "standard"])
def test_single_client_has_no_cosine_to_others(probes):
    """With nobody else in the round there is no mean of the others."""
    monitor, sink = watched(probes)
    federation(monitor, "mlp", clients=1)
    assert sink.value("update.norm", round=0) > 0
    assert "update.cosine_mean" not in sink.names()


@pytest.mark.parametrize("probes", ["light", "standard"])
def test_zero_update(probes):
    """A client that sends the received model back is told; it has no direction, and the others' stay right."""
    monitor, sink = watched(probes)
    shared = make("mlp")

    def nothing(number, client, model):
        if client == 1:
            model.load_state_dict(shared.state_dict())

    updates = federation(monitor, "mlp", rounds=1, tamper=nothing)
    assert [m.where.node for m in sink.metrics("update.zero")] == ["c1"]
    assert sink.value("update.norm", node="c1") == 0
    assert not sink.metrics("update.cosine_mean", node="c1")
    close(sink.value("update.cosine_mean", node="c0"), cosine(updates[0, 0], updates[0, 2] + updates[0, 3]), 1e-3)


@pytest.mark.parametrize("probes", ["light", "standard"])
@pytest.mark.parametrize("memory", [512 << 20, 0])
def test_identical_updates_are_counted(probes, memory):
    """Clients that send exactly the same are told how many others did, and nobody else is."""
    kept = {}

    def copied(number, client, model):
        if client == 0:
            kept[number] = copy.deepcopy(model.state_dict())
        elif client in (2, 3):
            model.load_state_dict(kept[number])

    monitor, sink = watched(probes, update_memory=memory)
    federation(monitor, "mlp", clients=5, rounds=1, tamper=copied)
    assert {m.where.node: m.value for m in sink.metrics("update.duplicates")} == {"c0": 2, "c2": 2, "c3": 2}


@pytest.mark.parametrize("probes", ["light", "standard"])
@pytest.mark.parametrize("memory", [512 << 20, 0])
def test_nan_update_does_not_poison_the_others(probes, memory):
    """An update with NaN has a norm over its finite values and no cosine; the others' cosines leave it out."""

    def poison(number, client, model):
        if client == 2:
            model[0].weight[0, 0] = float("nan")

    monitor, sink = watched(probes, update_memory=memory)
    updates = federation(monitor, "mlp", rounds=2, tamper=poison)
    for number in range(2):
        wanted = cosine(updates[number, 0], updates[number, 1] + updates[number, 3])
        tolerance = 1e-3 if memory else 4 * COSINE_ERROR
        assert sink.value("update.cosine_mean", node="c0", round=number) == pytest.approx(wanted, abs=tolerance)
        finite = updates[number, 2][updates[number, 2].isfinite()]
        close(sink.value("update.norm", node="c2", round=number), float(finite.norm()), 1e-4)
        assert not sink.metrics("update.cosine_mean", node="c2", round=number)
    assert not sink.metrics("update.cosine_previous", node="c2")


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("brief", [True, False])
def test_client_that_outweighs_all_others(scale, brief):
    """A boosted update, however large, still has a cosine to the others that is right, and so have they."""
    torch.manual_seed(0)
    vectors = {f"c{i}": torch.randn(1000) for i in range(6)}
    vectors["c3"] = (0.5 * sum(vectors.values()) + torch.randn(1000)) * scale
    updates = UpdateTracker(brief=brief)
    for node, vector in vectors.items():
        updates.add(node, vector, None if brief else np.asarray(sums(list(vector.split(250)))))
    closed = updates.close_round()
    assert [update.node for update in closed] == [*vectors]
    for update in closed:
        others = sum(v.double() for node, v in vectors.items() if node != update.node)
        assert update.metrics["update.cosine_mean"] == pytest.approx(cosine(vectors[update.node], others), abs=2e-3)


def test_updates_that_the_host_hands_over():
    """A host without models to hook tells the updates themselves; told twice, the last word counts, once."""
    monitor, sink = watched()
    shared = make("mlp")
    handed = {f"c{i}": [torch.randn_like(p) for p in shared.parameters()] for i in range(3)}
    with monitor, monitor.round(0, shared):
        assert monitor.updates(0, {node: [t + 1 for t in tensors] for node, tensors in handed.items()}) == ()
        monitor.updates(0, handed)
    vectors = {node: torch.cat([t.reshape(-1) for t in tensors]) for node, tensors in handed.items()}
    close(sink.value("update.cosine_mean", node="c0"), cosine(vectors["c0"], vectors["c1"] + vectors["c2"]), 1e-3)
    assert sink.value("clients") == 3


def test_host_that_opens_clients_and_hands_updates_over():
    """Both ways at once: no client is counted twice, and it keeps its group."""
    monitor, sink = watched()
    shared = make("mlp")
    sent = {}
    with monitor, monitor.round(0, shared):
        for client in range(3):
            model = copy.deepcopy(shared)
            with monitor.client(f"c{client}", model, group="edge-0"):
                train(model, torch.optim.SGD(model.parameters(), 0.2), make_data(seed=client), 2)
            sent[f"c{client}"] = [
                a.detach() - b.detach() for a, b in zip(model.parameters(), shared.parameters(), strict=True)
            ]
        monitor.updates(0, sent)
    vectors = {node: torch.cat([t.reshape(-1) for t in tensors]) for node, tensors in sent.items()}
    close(
        sink.value("update.cosine_mean", node="c0", group="edge-0"),
        cosine(vectors["c0"], vectors["c1"] + vectors["c2"]),
        1e-3,
    )
    assert sink.layers("update", node=None, group=None).get("count").sum() == 3 * len(vectors["c0"])


def test_clients_with_models_of_different_size():
    """Each is compared with its like; the round is told as usual."""
    monitor, sink = watched()
    sizes = [4, 4, 4, 6, 6, 9]
    with monitor, monitor.round(0):
        for client, width in enumerate(sizes):
            torch.manual_seed(client)
            model = nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 3))
            with monitor.client(f"c{client}", model):
                train(model, torch.optim.SGD(model.parameters(), 0.2), make_data(), 2)
    assert {m.where.node for m in sink.metrics("update.cosine_mean")} == {"c0", "c1", "c2", "c3", "c4"}
    assert sink.value("clients") == 6
    for client, width in enumerate(sizes):
        found = sink.layers("update", node=f"c{client}")
        assert sink.table(found.table).layers[0].shape == (width, 12)


def test_past_its_memory_cosines_come_from_sketches():
    """With too little memory cosines are estimates within their stated error, and one Event says so."""
    monitor, sink = watched(update_memory=1000)
    updates = federation(monitor, "mlp", clients=6, rounds=3)
    errors = []
    for (number, client), own in updates.items():
        others = sum(u for (n, c), u in updates.items() if n == number and c != client)
        found = sink.value("update.cosine_mean", node=f"c{client}", round=number)
        errors.append(found - cosine(own, others))
        if number:
            past = sink.value("update.cosine_previous", node=f"c{client}", round=number)
            errors.append(past - cosine(own, updates[number - 1, client]))
    assert 0 < np.std(errors) < 2 * COSINE_ERROR
    assert [e.where.round for e in sink.events("updates.approximate")] == [0]
    share = sink.layers("update.alignment", node="c0", round=2).matrix[:, SHARE]
    assert share.sum() == pytest.approx(1)


def test_memory_that_runs_out_in_the_midst_of_a_brief_round():
    """The first clients of that round, whose vectors are there, are compared by sketches with the rest."""
    vectors = [torch.randn(2000, generator=torch.Generator().manual_seed(i)) + 1 for i in range(6)]
    updates = UpdateTracker(brief=True, memory=3 * 8000)
    for i, vector in enumerate(vectors):
        updates.add(f"c{i}", vector, None)
    closed = updates.close_round()
    assert len(closed) == len(vectors)
    for i, update in enumerate(closed):
        wanted = cosine(vectors[i], sum(vectors) - vectors[i])
        assert update.metrics["update.cosine_mean"] == pytest.approx(wanted, abs=4 * COSINE_ERROR)


@pytest.mark.parametrize("tracker", [UpdateTracker, ArrayUpdates])
def test_what_is_kept_of_clients_that_do_not_come_back_is_bounded(tracker, monkeypatch):
    """Rows of a stack are kept alone, and who was absent longest is forgotten."""
    for module in (updates_module, numpy_updates):
        monkeypatch.setattr(module, "MOST_CLIENTS", 5)
    updates = tracker(brief=False, memory=1 << 20)
    chance = np.random.default_rng(0)
    for number in range(8):
        stack = torch.from_numpy(chance.normal(size=(4, 300)).astype(np.float32))
        vectors = stack if tracker is UpdateTracker else stack.numpy().copy()
        for row, client in zip(vectors, (number, number + 1, 100 + number, 0), strict=True):
            updates.add(f"c{client}", row, rows=sums([torch.as_tensor(row)]))
        closed = {update.node: update for update in updates.close_round()}
        repeats = {f"c{number}", "c0"} if number else set()
        assert {node for node, update in closed.items() if "update.cosine_previous" in update.metrics} == repeats
        assert len(updates._previous) <= 5
        assert updates.held_bytes == len(updates._previous) * 1200
    if tracker is UpdateTracker:
        assert all(old.vector.untyped_storage().nbytes() == 1200 for old in updates._previous.values())
        assert all(old.sketch.untyped_storage().nbytes() == 8 * 256 for old in updates._previous.values())


def test_sketches_are_recorded():
    """In `standard` every client's update leaves 256 numbers a round; `light` leaves none."""
    for probes, count in (("standard", 8), ("light", 0)):
        monitor, sink = watched(probes)
        updates = federation(monitor, "mlp")
        sketches = sink.of(Sketch)
        assert len(sketches) == count
        for sketch in sketches:
            own = updates[sketch.where.round, int(sketch.where.node[1:])]
            close(sketch.values, count_sketch(own.float()).numpy(), 1e-3)
            assert sketch.version == VERSION


@pytest.mark.parametrize("memory", [-1, "much", None, float("nan")])
def test_memory_that_is_no_number_of_bytes_is_refused(memory):
    with pytest.raises(ConfigError, match="number of bytes"):
        make_instruments("light", memory)
