# SPDX-License-Identifier: Apache-2.0
"""`update.peers` against a slow twin that forms each vector of the definitions, in float64."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from fedvitals.kernels import sums
from fedvitals.kernels.sketch import COSINE_ERROR
from fedvitals.probes import layer_products, peer_columns, peers
from fedvitals.probes.updates import UpdateTracker
from fedvitals.records import Layer, LayerTable
from fedvitals.stats import PEER_COLUMNS
from support.conditions import holds_for_each
from support.models import MODELS, flat, make, make_data, train, watched


def unit(vector):
    return vector / vector.norm() if vector.norm() > 0 else vector


def cosine(a, b):
    return float(unit(a) @ unit(b)) if a.norm() > 0 and b.norm() > 1e-9 else math.nan


def to_others(pieces, i):
    """Cosine of a client's piece to the sum of the others' unit pieces."""
    others = sum((unit(piece) for j, piece in enumerate(pieces) if j != i), start=torch.zeros_like(pieces[i]))
    return cosine(pieces[i], others)


def sign_agreement(updates, i):
    signs = torch.stack([u.sign() for u in updates])
    others = (signs.sum(0) - signs[i]).sign()
    counted = (signs[i] != 0) & (others != 0)
    return float((signs[i] == others)[counted].double().mean())


def of_classes(heads, i):
    """Mean and smallest cosine of the head's rows to the others' rows, and the entropy of the rows' sizes."""
    others = sum(unit(head.flatten()).view_as(head) for j, head in enumerate(heads) if j != i)
    sizes = heads[i].norm(dim=1)
    cosines = [cosine(mine, theirs) for mine, theirs in zip(heads[i], others, strict=True)]
    known = [(c, float(s)) for c, s in zip(cosines, sizes, strict=True) if not math.isnan(c)]
    mean = sum(c * s for c, s in known) / sum(s for _, s in known)
    least = min(c for c, s in known if s > 0.5 * float(sizes.mean()))
    shares = sizes**2 / (sizes**2).sum()
    entropy = -sum(float(p) * math.log(float(p)) for p in shares if p > 0) / math.log(len(sizes))
    return mean, least, entropy


def twin(updates, i, shapes, models):
    """The row of one client: from all updates, as float64 vectors, and the global models, newest last."""
    own = updates[i]
    pieces = [u.split([math.prod(s) for s in shapes]) for u in updates]
    weights = [k for k, shape in enumerate(shapes) if len(shape) >= 2]
    head = weights[-1]
    mean, least, entropy = of_classes([p[head].view(shapes[head][0], -1) for p in pieces], i)
    biased = head + 1 < len(shapes) and len(shapes[head + 1]) == 1
    now, past = models[-1], models[-2:-7:-1]
    return {
        "cosine": to_others(updates, i),
        "first": to_others([p[weights[0]] for p in pieces], i),
        "head": to_others([p[head] for p in pieces], i),
        "step": cosine(own, now - past[0]) if past else math.nan,
        "back": max((cosine(own, model - now) for model in past), default=math.nan),
        "nearest": max(cosine(own, u) for j, u in enumerate(updates) if j != i),
        "signs": sign_agreement(updates, i),
        "classes": mean,
        "classes_min": least,
        "class_entropy": entropy,
        "bias": to_others([p[head + 1] for p in pieces], i) if biased else math.nan,
        "spread": float(own.abs().sum() / (own.norm() * len(own) ** 0.5)),
    }


def federation(monitor, name, rounds=8, clients=5):
    """Plain averaging; gives each round's updates and all global models, as float64 vectors."""
    shared = make(name)
    updates, models = [], []
    with monitor:
        for number in range(rounds):
            models.append(flat(shared))
            with monitor.round(number, shared):
                locals_ = [copy.deepcopy(shared) for _ in range(clients)]
                for client, model in enumerate(locals_):
                    with monitor.client(f"c{client}", model):
                        train(model, torch.optim.SGD(model.parameters(), 0.2), make_data(seed=client), 3)
                updates.append([flat(model) - models[-1] for model in locals_])
                mean = models[-1] + sum(updates[-1]) / clients
                with torch.no_grad():
                    nn.utils.vector_to_parameters(mean.float(), shared.parameters())
    return updates, models


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_every_column_against_the_slow_twin(name):
    """A federation that trains: each client's row in each round, from what the definitions say."""
    monitor, sink = watched()
    updates, models = federation(monitor, name)
    shapes = [tuple(p.shape) for p in make(name).parameters()]
    for number in (0, 1, 7):
        for client in range(5):
            found = sink.layers("update.peers", node=f"c{client}", round=number).matrix
            wanted = twin(updates[number], client, shapes, models[: number + 1])
            assert found.shape == (1, len(PEER_COLUMNS))
            for column, value in zip(PEER_COLUMNS, found[0], strict=True):
                near = 4 * COSINE_ERROR if column == "nearest" and wanted[column] < 0.95 else 2e-3
                assert value == pytest.approx(wanted[column], abs=near, nan_ok=True), column
    table = sink.table(sink.layers("update.peers", node="c0", round=7).table)
    assert (table.rows, table.names) == ("model", ("model",))
    assert table.layers[0].shape == (len(updates[0][0]),)


# -- the same on updates made by hand ---------------------------------------------------------------------------------

SHAPES = [(40, 30), (40,), (7, 40), (7,)]
TABLE = LayerTable("parameter", tuple(Layer(f"p{i}", shape, "float32") for i, shape in enumerate(SHAPES)))
SIZES = [math.prod(shape) for shape in SHAPES]
SIZE = sum(SIZES)


def some(clients, *, common=1.0, seed=0, size=SIZE):
    """Updates with a part in common, as the rows of one matrix."""
    stream = torch.Generator().manual_seed(seed)
    return common * torch.randn(size, generator=stream) + torch.randn(clients, size, generator=stream)


def rows_of(vectors, *, models=(), sizes=SIZES, **settings):
    """Each client's row, as a dictionary by column."""
    updates = UpdateTracker(**settings)
    updates.know([TABLE])
    for number, model in enumerate(models):
        updates.begin_round(number, [model])
    for i, vector in enumerate(vectors):
        updates.add(f"c{i}", vector, np.asarray(sums(list(vector.split(sizes)))))
    found = [update.peers for update in updates.close_round()]
    return [None if row is None else dict(zip(PEER_COLUMNS, row[0].tolist(), strict=True)) for row in found]


def check(rows, vectors, models, *, near=2e-5, columns=PEER_COLUMNS):
    doubles = [vector.double() for vector in vectors]
    for i, row in enumerate(rows):
        wanted = twin(doubles, i, SHAPES, [model.double() for model in models] or [doubles[0]])
        for column in columns:
            sketched = column == "nearest" and wanted[column] < peers.CANDIDATE
            error = 5 * COSINE_ERROR if sketched else near
            assert row[column] == pytest.approx(wanted[column], abs=error, nan_ok=True), (i, column)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rounds", [0, 1, 3, 9])
def test_vectors_in_one_matrix_and_apart(apart, rounds, monkeypatch):
    """The same numbers, in stretches that are shorter than a layer; models are those of the last six rounds."""
    monkeypatch.setattr(layer_products, "SHORTEST", 1024)
    monkeypatch.setattr(layer_products, "PIECE", 1)
    updates, models = some(6, common=3.0), list(some(rounds, seed=1).cumsum(0))
    vectors = [row.clone() for row in updates] if apart else list(updates)
    assert (layer_products.as_matrix(vectors) is None) == apart
    check(rows_of(vectors, models=models), vectors, models)


def test_whoever_sends_much_is_one_among_all():
    """A boosted update changes nobody's numbers, not even its own."""
    plain, boosted = some(5), some(5)
    boosted[3] *= 1e6
    rows = rows_of(list(plain))
    assert len(rows) == 5
    for a, b in zip(rows, rows_of(list(boosted)), strict=True):
        assert b == pytest.approx(a, abs=1e-5, nan_ok=True)


def test_others_that_cancel_each_other():
    """Where the others sum up to nothing there is no direction; to nearly nothing, it is computed with care."""
    a, b, noise = some(3, common=0)
    exact = rows_of([a, b, -b])
    assert math.isnan(exact[0]["cosine"])
    assert exact[1]["cosine"] == pytest.approx(to_others([a.double(), b.double(), -b.double()], 1), abs=1e-5)
    vectors = [a, b, -b + 1e-3 * noise]
    check(rows_of(vectors), vectors, [], near=2e-3, columns=("cosine", "first", "head", "bias", "classes"))


def test_zero_and_nonfinite_updates_count_for_nobody():
    """Their own rows are NaN; the rows of the others are as if they were not there."""
    updates = some(6)
    updates[1], updates[4, 7] = 0.0, math.nan
    found = rows_of(list(updates))
    assert holds_for_each(math.isnan(value) for i in (1, 4) for value in found[i].values())
    others = [i for i in range(6) if i not in (1, 4)]
    check([found[i] for i in others], [updates[i] for i in others], [])


def test_frozen_layers_have_no_direction():
    """A client that leaves the first layer as it was has no cosine there, and the others do without it."""
    updates = some(4)
    updates[2, : SIZES[0]] = 0.0
    found = rows_of(list(updates))
    assert math.isnan(found[2]["first"])
    check(found, list(updates), [])


def test_one_client_alone_has_no_peers():
    """What needs others is NaN; what does not is there."""
    (found,) = rows_of(list(some(1)), models=list(some(2, seed=1)))
    known = {column for column, value in found.items() if not math.isnan(value)}
    assert known == {"step", "back", "class_entropy", "spread"}


def test_brief_presets_have_none():
    assert rows_of(list(some(3)), brief=True) == [None] * 3


def test_layers_that_are_not_known():
    """Without shapes, nothing is said of the first layer and the head."""
    found = rows_of(list(some(4)), sizes=[SIZE])
    missing = {column for column, value in found[0].items() if math.isnan(value)}
    assert missing == {"first", "head", "step", "back", "classes", "classes_min", "class_entropy", "bias"}


def test_copies_are_near_each_other_to_the_last_bit():
    """A copy with little noise has its source as nearest, both with the same number; the others have none so near."""
    updates = some(12, common=0.5)
    updates[5] = updates[2] + 0.05 * some(1, seed=7)[0]
    found = [row["nearest"] for row in rows_of(list(updates))]
    assert found[5] == found[2] == pytest.approx(cosine(updates[5].double(), updates[2].double()), abs=1e-6)
    assert max(value for i, value in enumerate(found) if i not in (2, 5)) < 0.6


@pytest.mark.parametrize("at_once", [0, 1 << 30])
def test_nearest_where_all_are_near(at_once, monkeypatch):
    """Of many candidates the best few are compared exactly: what is told is a true cosine, and nearly the largest."""
    monkeypatch.setattr(peers, "PAIRED_AT_ONCE", at_once)
    updates = some(30, common=4.0)
    units = updates.double() / updates.double().norm(dim=1, keepdim=True)
    exact = (units @ units.T).fill_diagonal_(-1).numpy()
    for most in (1 << 30, 1):
        monkeypatch.setattr(peers, "PAIRED_NUMBERS", most)
        for i, row in enumerate(rows_of(list(updates))):
            assert np.abs(exact[i] - row["nearest"]).min() < 1e-5
            assert row["nearest"] > np.median(exact[i]) - 0.01


def test_candidates_are_few():
    """Four for each client at most, and one for each however few are allowed."""
    cosines = peers.cosines_of(np.ones((50, 256)) + 0.1 * np.random.default_rng(0).normal(size=(50, 256)))
    assert (cosines[~np.eye(50, dtype=bool)] > peers.CANDIDATE).all()
    assert 50 < len(peers.candidates(cosines, 1 << 30)) <= 4 * 50
    few = peers.candidates(cosines, 0)
    assert {i for pair in few for i in pair} == set(range(50))
    assert len(few) <= 50
    assert peers.candidates(0.5 * cosines, 100) == []


def test_signs_of_evenly_spread_coordinates(monkeypatch):
    """Of a large update, runs of neighbours from all over it; the share is that of these coordinates."""
    monkeypatch.setattr(peer_columns, "MOST_SIGNS", 1024)
    updates = some(5, size=10_000)
    updates[:, ::7] = 0.0
    every = peers.sign_stride(5, 10_000)
    chosen = peers.chosen_coordinates(updates, every).flatten(1)
    places = peers.chosen_coordinates(torch.arange(10_000), every).flatten()
    assert torch.equal(chosen, updates[:, places])
    assert 512 <= len(places) <= 1024
    assert places.diff().max() == (every - 1) * peers.RUN_OF_SIGNS + 1
    for i, share in enumerate(peers.agreement(chosen.sign())):
        assert share == pytest.approx(sign_agreement(list(chosen), i), abs=1e-12)
    assert peers.sign_stride(5, 1024) == 1
    assert peers.chosen_coordinates(torch.arange(1 << 20), peers.sign_stride(100_000, 1 << 20)).numel() < 1024


def test_past_its_memory_sketches_say_what_they_can():
    """Cosine and nearest within the sketch's error, the spread exactly, and nothing else."""
    updates = some(8)
    rows = rows_of(list(updates), models=list(some(3, seed=1)), memory=100)
    assert len(rows) == 8
    for i, row in enumerate(rows):
        wanted = twin([u.double() for u in updates], i, SHAPES, [updates[0]])
        for column in ("cosine", "nearest"):
            assert row[column] == pytest.approx(wanted[column], abs=5 * COSINE_ERROR)
        assert row["spread"] == pytest.approx(wanted["spread"], abs=1e-6)
        assert {c for c, value in row.items() if not math.isnan(value)} == {"cosine", "nearest", "spread"}


def test_models_are_kept_only_where_they_fit():
    models = peers.PastModels(6 * 4 * 10)
    for number in range(9):
        models.add(number, [torch.full((10,), float(number))])
    assert models.compared_with(torch.zeros(10)) == 5
    back = models.backwards(slice(3, 5), layer_products.Workspace())
    assert back.tolist() == [[-1, -1], [-2, -2], [-3, -3], [-4, -4], [-5, -5]]
    models.add(8, [torch.full((10,), 9.0)])  # the round is begun again
    assert models.backwards(slice(None), layer_products.Workspace())[:, 0].tolist() == [-2, -3, -4, -5, -6]
    assert models.compared_with(torch.zeros(11)) == 0
    models.add(9, [torch.zeros(11)])
    assert models.compared_with(torch.zeros(10)) == 0


def test_a_model_is_copied_into_the_memory_of_one_that_is_no_longer_needed():
    models, parameter = peers.PastModels(1 << 20), torch.zeros(10)
    for number in range(20):
        models.add(number, [parameter.fill_(float(number))])
    addresses = {model.data_ptr() for _, model in models._past}
    models.add(20, [parameter.fill_(20.0)])
    assert {model.data_ptr() for _, model in models._past} == addresses
    assert parameter.data_ptr() not in addresses
    assert models.backwards(slice(None), layer_products.Workspace())[:, 0].tolist() == [-1, -2, -3, -4, -5]


@pytest.mark.parametrize(
    ("shapes", "places"),
    [
        ([(4, 3), (4,), (2, 4), (2,)], ((0, 12), (16, 24), (24, 26))),
        ([(4,), (8, 3, 3), (8,), (4, 8)], ((4, 76), (84, 116), None)),
        ([(5, 2)], ((0, 10), (0, 10), None)),
        ([(5,), (5,)], (None, None, None)),
        ([], (None, None, None)),
    ],
)
def test_first_weight_head_and_bias(shapes, places):
    table = LayerTable("parameter", tuple(Layer(f"p{i}", shape, "float32") for i, shape in enumerate(shapes)))
    layout = peers.layout_of(table)
    found = [p and (p.place.start, p.place.stop) for p in (layout.first, layout.head, layout.bias)]
    assert tuple(found) == places
