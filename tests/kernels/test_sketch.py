# SPDX-License-Identifier: Apache-2.0
"""The count sketch: its definition in plain Python, what it preserves, and its versions in a store."""

import sqlite3

import numpy as np
import pytest
import torch

from fedvitals.kernels import count_sketch
from fedvitals.kernels.cpu import jit
from fedvitals.kernels.sketch import COSINE_ERROR, SIZE, by_torch
from fedvitals.records import Run, Sketch, Where
from fedvitals.store import open_reader, open_store
from fedvitals.transport.wire.payload import decode, encode
from fedvitals.views.update_map import rounds_with_sketches, sketches
from support.paths import GOLDEN

LENGTHS = (0, 1, 15, 16, 17, 255, 256, 257, 1000, 5000)


def mix(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    return ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF


def oracle(vector: torch.Tensor) -> torch.Tensor:
    """The definition, coordinate by coordinate."""
    totals = [0.0] * SIZE
    for i, value in enumerate(vector.tolist()):
        sign = -1.0 if mix(i) >> 31 else 1.0
        totals[(i + (mix((i >> 8) ^ 0x5BD1E995) >> 24)) % SIZE] += sign * value
    return torch.tensor(totals, dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_path_follows_the_definition(length, dtype):
    vector = random(length).to(dtype)
    expected = oracle(vector.double())
    torch.testing.assert_close(count_sketch(vector), expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(by_torch(vector.double()[None])[0], expected, rtol=0, atol=1e-11)


def test_compiled_code_serves_the_cpu():
    assert jit.load_kernel().kernel is not None, jit.load_kernel().reason


def test_without_compiled_code_torch_computes_the_same(monkeypatch):
    vectors = random(3, 700).float()
    compiled = count_sketch(vectors)
    monkeypatch.setattr(jit, "load_kernel", lambda: jit.LoadedKernel(None, "the test asks for it"))
    torch.testing.assert_close(count_sketch(vectors), compiled, rtol=0, atol=1e-11)


@pytest.mark.thorough
def test_coordinates_beyond_32_bits(monkeypatch):
    """`by_torch` on a shifted index equals the definition: the high half of an index enters the hash."""
    first = 5 << 32
    arange = torch.arange

    def shifted(*arguments, **options):
        if len(arguments) == 2:
            arguments = tuple(argument + first // SIZE for argument in arguments)
        return arange(*arguments, **options)

    vector = random(600)
    totals = [0.0] * SIZE
    for i, value in enumerate(vector.tolist()):
        sign = -1.0 if mix(i ^ (5 * 0x9E3779B9 & 0xFFFFFFFF)) >> 31 else 1.0
        totals[(i + (mix(((first + i) >> 8) ^ 0x5BD1E995) >> 24)) % SIZE] += sign * value
    monkeypatch.setattr(torch, "arange", shifted)
    torch.testing.assert_close(by_torch(vector[None])[0], torch.tensor(totals, dtype=torch.float64), rtol=0, atol=1e-11)


def test_rows_of_a_matrix_are_sketched_as_vectors_to_the_last_bit():
    matrix = random(5, 2000)[:, 100:1877].float()
    expected = torch.stack([count_sketch(row) for row in matrix])
    assert torch.equal(count_sketch(matrix), expected)
    assert torch.equal(count_sketch(matrix.T.contiguous().T), expected)
    moved = torch.cat([torch.zeros(3), matrix[0]])[3:]  # another address, another alignment
    assert torch.equal(count_sketch(moved), expected[0])


def test_inner_products_survive():
    """Over many random pairs the sketch's inner product is unbiased, and a cosine errs by about 1/16."""
    errors = []
    for seed in range(400):
        a, b = random(2, 3000, seed=seed)
        b = 0.6 * a + 0.8 * b
        x, y = count_sketch(a), count_sketch(b)
        exact = float(a @ b / (a.norm() * b.norm()))
        errors.append(float(x @ y / (x.norm() * y.norm())) - exact)
    assert abs(np.mean(errors)) < 4 * COSINE_ERROR / 20
    assert np.std(errors) < 1.2 * COSINE_ERROR
    one_hot = torch.eye(700)[::50]
    assert torch.equal((count_sketch(one_hot) ** 2).sum(1), torch.ones(len(one_hot), dtype=torch.float64))


@pytest.mark.parametrize("width", [256, 512, 768])
def test_one_column_of_a_matrix_is_spread_over_the_buckets(width):
    """An update of a single input unit: with buckets by index alone all of it would share one bucket."""
    errors = []
    for seed in range(200):
        a, b = torch.zeros(2, 400, width, dtype=torch.float64)
        a[:, seed % width], b[:, seed % width] = random(2, 400, seed=seed)
        errors.append(float(count_sketch(a.flatten()) @ count_sketch(b.flatten()) - (a * b).sum()) / 400)
    assert np.std(errors) < 1.3 * COSINE_ERROR


def test_nothing_random_is_drawn():
    state = torch.get_rng_state()
    vector = random(5000).float()
    assert torch.equal(count_sketch(2 * vector), 2 * count_sketch(vector))
    assert torch.equal(torch.get_rng_state(), state)


def sketch(round_index: int, node: str, version: int, sequence: int) -> Sketch:
    values = tuple(float(i == version) for i in range(SIZE))
    return Sketch(Where("r-1", round_index, node), 1.0, values, "d", version, "w", sequence)


def test_the_version_travels_and_is_stored(tmp_path):
    records = [Run("r-1", "r"), sketch(1, "c1", 1, 1), sketch(1, "c2", 2, 2)]
    assert [r.version for r in decode(encode(records)) if isinstance(r, Sketch)] == [1, 2]
    with open_store(tmp_path / "runs.db") as store:
        store.write(records)
    with open_reader(tmp_path / "runs.db") as reader:
        assert reader.database.rows("SELECT node, version FROM sketches ORDER BY node") == [("c1", 1), ("c2", 2)]


def test_sketches_of_two_versions_are_never_on_one_map(tmp_path):
    """A run that was continued after an upgrade: only sketches of the newest version are placed on its map."""
    records = [Run("r-1", "r")]
    for round_index, version in ((1, 1), (2, 1), (3, 2), (4, 2)):
        records += [sketch(round_index, f"c{i}", version, 10 * round_index + i) for i in range(3)]
    records.append(sketch(3, "c9", 1, 99))
    with open_store(tmp_path / "runs.db") as store:
        store.write(records)
    with open_reader(tmp_path / "runs.db") as reader:
        assert rounds_with_sketches(reader, "r-1") == [3, 4]
        assert [*sketches(reader, "r-1", 3)] == ["c0", "c1", "c2"]


def test_a_store_of_schema_3_is_read_as_version_1(tmp_path):
    path = tmp_path / "old.db"
    database = sqlite3.connect(path)
    database.executescript((GOLDEN / "schema_v3.sql").read_text())
    database.execute("INSERT INTO symbol (id, text) VALUES (1, 'r-1'), (2, 'c1'), (3, 'w')")
    database.execute("INSERT INTO run_round VALUES (1, 1, 0, 0)")
    columns = 'run, round, node, at, "values", digest, source, sequence'
    values = np.ones(SIZE, "<f4").tobytes()
    database.execute(f"INSERT INTO sketch ({columns}) VALUES (1, 1, 2, 0.0, ?, '', 3, 1)", (values,))
    database.commit()
    database.close()
    with open_reader(path) as reader:
        assert rounds_with_sketches(reader, "r-1") == [1]
        assert [*sketches(reader, "r-1", 1)] == ["c1"]
