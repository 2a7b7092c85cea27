# SPDX-License-Identifier: Apache-2.0
"""The map of updates: the plane of scikit-learn's components, the same whatever way the sketches are turned."""

import base64
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.hierarchy import average
from scipy.spatial.distance import pdist, squareform
from sklearn.decomposition import PCA

from fedvitals.records import Run, Sketch, Where
from fedvitals.store import open_reader, open_store
from fedvitals.views.update_map import (
    MOST_SIMILAR,
    POOLED,
    Layouts,
    alike_in_order,
    cosines,
    directions,
    layout_of,
    plane_of,
    pooled_rounds,
    rounds_with_sketches,
    similarity,
    update_map,
)
from support.conditions import holds_for_each


def cohort(clients: int, width: int = 32, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    common = rng.normal(size=width)
    return {f"c{i}": common + rng.normal(size=width) for i in range(clients)}


def distances(points: np.ndarray) -> np.ndarray:
    return squareform(pdist(points))


@pytest.mark.parametrize("clients", [3, 12, 80])
def test_the_plane_is_that_of_the_first_two_components(clients: int) -> None:
    vectors = cohort(clients)
    layout = layout_of(vectors)
    _, units = directions(vectors)
    theirs = PCA(2).fit(units)
    np.testing.assert_allclose(distances(layout.points), distances(theirs.transform(units)), atol=1e-9)
    np.testing.assert_allclose(layout.shares, theirs.explained_variance_ratio_, rtol=1e-6)


def test_the_plane_of_many_rounds_takes_the_memory_of_one() -> None:
    peaks = []
    for rounds in (2, POOLED):
        units = [directions(cohort(10, 256, seed))[1] for seed in range(rounds)]
        tracemalloc.start()
        plane_of(units)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


@given(st.integers(0, 10_000), st.integers(3, 40))
def test_turning_all_sketches_moves_no_client_against_another(seed: int, clients: int) -> None:
    vectors = cohort(clients, 16, seed)
    turn, _ = np.linalg.qr(np.random.default_rng(seed + 1).normal(size=(16, 16)))
    turned = layout_of({name: vector @ turn for name, vector in vectors.items()})
    np.testing.assert_allclose(distances(turned.points), distances(layout_of(vectors).points), atol=1e-7)


@given(st.integers(0, 10_000), st.floats(1e-3, 1e3))
def test_equal_directions_coincide_whatever_their_size(seed: int, factor: float) -> None:
    vectors = cohort(8, 16, seed)
    vectors["c3"] = factor * vectors["c5"]
    layout = layout_of(vectors)
    np.testing.assert_allclose(layout.points[3], layout.points[5], atol=1e-9)


def test_squared_distance_is_two_minus_two_cosines_where_the_plane_holds_all() -> None:
    rng = np.random.default_rng(3)
    flat = np.c_[rng.normal(size=(6, 2)), np.zeros((6, 4))]
    layout = layout_of({f"c{i}": row for i, row in enumerate(flat)})
    _, units = directions({f"c{i}": row for i, row in enumerate(flat)})
    np.testing.assert_allclose(distances(layout.points) ** 2, 2 - 2 * cosines(units), atol=1e-9)
    assert sum(layout.shares) == pytest.approx(1)


def test_what_has_no_direction_is_left_out_and_counted() -> None:
    vectors = cohort(5)
    vectors["zero"] = np.zeros(32)
    vectors["nan"] = np.full(32, np.nan)
    vectors["inf"] = np.full(32, np.inf)
    layout = layout_of(vectors)
    assert layout.names == ("c0", "c1", "c2", "c3", "c4")
    assert layout.unusable == 3
    assert np.isfinite(layout.points).all()


@pytest.mark.parametrize("clients", [0, 1, 2])
def test_few_clients_are_no_error(clients: int) -> None:
    layout = layout_of(cohort(clients))
    assert layout.points.shape == (clients, 2)
    assert np.isfinite(layout.points).all()


def test_a_rounds_own_plane_is_turned_to_the_runs() -> None:
    """Nearly the same updates: every point stays where it was, though components may flip or change places."""
    rng = np.random.default_rng(1)
    flat = {f"c{i}": np.r_[1.0, rng.normal(size=2), np.zeros(29)] for i in range(20)}
    before = layout_of(flat)
    for _ in range(10):
        noisy = {name: vector + 0.01 * rng.normal(size=32) for name, vector in flat.items()}
        assert np.abs(layout_of(noisy, before.axes).points - before.points).max() < 0.1
    turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
    np.testing.assert_allclose(layout_of(flat, before.axes @ turn).points, before.points @ turn, atol=1e-9)


def test_in_the_runs_plane_points_move_only_as_updates_do() -> None:
    first, second = cohort(20, seed=1), cohort(20, seed=1)
    second["c7"] = -second["c7"]
    plane = plane_of([directions(first)[1], directions(second)[1]])
    before, after = layout_of(first, plane, "run"), layout_of(second, plane, "run")
    moved = np.linalg.norm(after.points - before.points, axis=1)
    assert int(np.argmax(moved)) == 7
    assert moved[7] > 5 * np.median(moved)


@given(st.integers(0, 1000))
def test_the_plane_of_one_round_is_its_own(seed: int) -> None:
    vectors = cohort(12, 16, seed)
    own = layout_of(vectors)
    shared = layout_of(vectors, plane_of([directions(vectors)[1]]), "run")
    np.testing.assert_allclose(distances(shared.points), distances(own.points), atol=1e-7)
    np.testing.assert_allclose(sorted(shared.shares), sorted(own.shares), atol=1e-7)


def test_of_many_rounds_some_make_the_plane_and_stay_as_the_run_grows() -> None:
    assert pooled_rounds(range(5)) == range(5)
    for length in range(1, 400):
        now, later = pooled_rounds(range(length)), pooled_rounds(range(length + 1))
        assert len(now) <= POOLED
        assert set(now) <= set(later) or len(later) <= len(now) // 2 + 1


def test_the_order_puts_groups_together() -> None:
    rng = np.random.default_rng(2)
    groups = [rng.normal(size=24) for _ in range(3)]
    labels = rng.permutation(np.repeat([0, 1, 2], 10))
    vectors = np.stack([groups[label] + 0.2 * rng.normal(size=24) for label in labels])
    order = alike_in_order(cosines(vectors / np.linalg.norm(vectors, axis=1, keepdims=True)))
    assert sorted(order) == list(range(30))
    runs = 1 + int(np.sum(np.diff(labels[order]) != 0))
    assert runs == 3


def test_the_order_is_one_of_the_average_linkage_tree() -> None:
    """Every branch of SciPy's tree stands together in our order."""
    units = np.random.default_rng(5).normal(size=(40, 8))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    order = alike_in_order(cosines(units))
    branches = [{i} for i in range(40)]
    for first, second, _, size in average(squareform(1 - cosines(units), checks=False)):
        branches.append(branches[int(first)] | branches[int(second)])
        places = sorted(order.index(i) for i in branches[-1])
        assert len(places) == size
        assert places == list(range(places[0], places[0] + len(places)))


def test_of_many_clients_the_suspects_are_in_the_matrix() -> None:
    vectors = cohort(MOST_SIMILAR + 200)
    layout = layout_of(vectors)
    _, units = directions(vectors)
    shown = similarity(layout, units, ["c431", "c77"])
    assert len(shown.names) == len(set(shown.names)) == MOST_SIMILAR
    assert {"c431", "c77"} <= set(shown.names)
    assert shown.total == MOST_SIMILAR + 200
    values = np.frombuffer(base64.b64decode(shown.values), "<f4").reshape(MOST_SIMILAR, MOST_SIMILAR)
    place = {name: i for i, name in enumerate(layout.names)}
    i, k = (place[shown.names[n]] for n in (0, 17))
    assert values[0, 17] == pytest.approx(float(units[i] @ units[k]), abs=1e-6)
    np.testing.assert_allclose(np.diag(values), 1, atol=1e-6)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "runs.db"
    rng = np.random.default_rng(4)
    means = rng.normal(size=(6, 256))
    with open_store(path) as writer:
        records = [Run("r", "r", started=1.0)]
        for number in (2, 3, 5, 8, 13):
            for i in range(6):
                if (number, i) != (5, 4):
                    values = means[i] + 0.1 * rng.normal(size=256)
                    records.append(Sketch(Where("r", number, f"c{i}"), float(number), tuple(values)))
        for sequence, record in enumerate(records):
            object.__setattr__(record, "source", "test")
            object.__setattr__(record, "sequence", sequence)
        writer.write(records)
    return path


def test_the_map_of_a_store(store: Path) -> None:
    with open_reader(store) as reader:
        assert rounds_with_sketches(reader, "r") == [2, 3, 5, 8, 13]
        layouts = Layouts()
        newest = update_map(reader, "r", layouts, node="c4", severities={"c4": "warning"})
        assert newest.round == 13
        assert newest.points[0].name == "c4"
        assert newest.points[0].severity == "warning"
        assert [step.round for step in newest.trail] == [2, 3, 8, 13]
        between = update_map(reader, "r", layouts, round_index=7)
        assert between.round == 5
        assert between.total == 5
        assert update_map(reader, "r", layouts, round_index=0).round == 2
        assert update_map(reader, "nobody", layouts).round is None


def test_whoever_opens_a_round_sees_what_others_saw_who_went_there(store: Path) -> None:
    with open_reader(store) as reader:
        walked = Layouts()
        for number in (2, 3, 5, 8, 13):
            by_steps = update_map(reader, "r", walked, round_index=number)
        at_once = update_map(reader, "r", Layouts(), round_index=13)
        first = {p.name: p for p in update_map(reader, "r", Layouts(), round_index=2).points}
    assert [(p.name, p.x, p.y) for p in by_steps.points] == [(p.name, p.x, p.y) for p in at_once.points]
    assert holds_for_each(abs(p.x - first[p.name].x) < 0.3 and abs(p.y - first[p.name].y) < 0.3 for p in at_once.points)
