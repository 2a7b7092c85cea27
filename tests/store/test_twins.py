# SPDX-License-Identifier: Apache-2.0
"""Memory and SQL give the same answers to whatever was written, in whatever batches; and a plain reading agrees."""

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedvitals.measurements import stamped
from fedvitals.records import Event, LayerStats, Metric, Where
from fedvitals.stats import FAMILIES, pack, unpack
from fedvitals.store import open_reader, open_store
from fedvitals.store.in_memory import MemoryStore
from fedvitals.store.upkeep import compaction
from support.store_contract import OTHER, RUN, TABLE, same

ROUNDS = st.one_of(st.none(), st.integers(-2, 25))
NODES = st.one_of(st.none(), st.sampled_from(["c1", "c2", "c10", "server"]))
TIMES = st.sampled_from([0.0, 1.0, 2.5, 1e9])
VALUES = st.floats(width=64, allow_nan=True, allow_infinity=True)
WHERE = st.builds(Where, st.sampled_from(["r-1", "r-2"]), ROUNDS, NODES, st.sampled_from([None, None, 0, 3]),
                  st.sampled_from([None, None, "conv.bias"]), st.sampled_from([None, None, "edge-1"]))  # fmt: skip
METRICS = st.builds(Metric, WHERE, TIMES, st.sampled_from(["loss", "accuracy"]), VALUES)
DATA = st.dictionaries(st.text(max_size=3), st.one_of(VALUES, st.text(max_size=3)), max_size=2)
EVENTS = st.builds(Event, WHERE, TIMES, st.just("info"), st.sampled_from(["a", "b"]), st.text(max_size=5), DATA)


@st.composite
def layer_stats(draw):
    family = draw(st.sampled_from(["gradient", "gradient.steps", "update.alignment"]))
    numbers = st.floats(0, 1e6, width=32)
    rows = np.array(draw(st.lists(numbers, min_size=3, max_size=3)))
    matrix = rows[:, None] * np.ones(len(FAMILIES[family].columns))
    return LayerStats(draw(WHERE), draw(TIMES), family, matrix, draw(st.sampled_from([TABLE, OTHER])).digest)


RECORDS = st.lists(st.one_of(METRICS, EVENTS, layer_stats(), layer_stats()), max_size=30)


def answers(history):
    found = [history.rounds(), history.nodes()]
    for name in ("loss", "accuracy", "none"):
        found += [history.latest(name, round_) for round_ in range(-2, 26)]
        found += [history.series(name, node) for node in (None, "c1", "c10", "nobody")]
    for family in ("gradient", "gradient.steps", "update.alignment", "weight"):
        found.append(history.layers(family))
        found += [history.matrix(family, FAMILIES[family].columns[1], layer) for layer in (*TABLE.names, "none")]
        found += [history.across(family, FAMILIES[family].columns[1:3], round_) for round_ in range(-2, 26)]
    for name in (None, "a"):
        found += [list(history.events(name, since)) for since in (None, 5)]
    return found


def zeros(node, table, family="gradient.steps"):
    matrix = np.zeros((3, len(FAMILIES[family].columns)))
    return LayerStats(Where("r-1", None, node), 0.0, family, matrix, table.digest)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
# In one batch, the layer table that comes first also comes last, with another node.
@example([zeros(None, TABLE), zeros(None, OTHER), zeros("c1", TABLE)], [1, *[3] * 29], False)
@given(RECORDS, st.lists(st.integers(1, 8), min_size=30, max_size=30), st.booleans())
def test_memory_and_sql_are_twins(records, sizes, again):
    records = [RUN, *(stamped(record, "m", i) for i, record in enumerate(records, start=1))]
    memory = MemoryStore()
    with tempfile.TemporaryDirectory() as folder, patch.object(compaction, "CHUNK_ROUNDS", 2):
        path = Path(folder) / "runs.db"
        with open_store(path) as store:
            while records:
                batch, records = records[: sizes[0]], records[sizes[0] :]
                sizes = sizes[1:] + sizes[:1]
                for _ in range(1 + again):
                    memory.write(batch)
                    store.write(batch)
        with open_reader(path) as reader:
            for run in ("r-1", "r-2", "r-3"):
                assert same(answers(memory.history(run)), answers(reader.history(run)))


@settings(max_examples=60, deadline=None)
@given(st.lists(layer_stats(), max_size=20))
def test_a_matrix_is_what_a_plain_reading_finds(records):
    memory = MemoryStore()
    memory.write([RUN, *records])
    rounds, nodes, matrix = memory.history("r-1").matrix("gradient", "max", "conv.bias")
    newest = {}
    for record in records:
        where = record.where
        if (where.run, record.family) == ("r-1", "gradient") and None not in (where.round, where.node):
            before = newest.get((where.round, where.node))
            if before is None or record.at >= before[0]:
                value = unpack("gradient", pack("gradient", record.matrix))[1, 5]  # second in both tables
                newest[where.round, where.node] = (record.at, value)
    assert rounds == sorted({round_ for round_, _ in newest})
    assert nodes == sorted({node for _, node in newest}, key=["c1", "c2", "c10", "server"].index)
    for i, round_ in enumerate(rounds):
        for j, node in enumerate(nodes):
            assert same(float(matrix[i, j]), float(newest.get((round_, node), (0, math.nan))[1]))


@settings(max_examples=60, deadline=None)
@given(st.lists(layer_stats(), max_size=20))
def test_one_round_is_what_a_plain_reading_finds(records):
    memory = MemoryStore()
    memory.write([RUN, *records])
    history = memory.history("r-1")
    for round_ in range(-2, 26):
        newest = {}
        for record in records:
            where = record.where
            mine = (where.run, record.family, where.round, where.step) == ("r-1", "gradient", round_, None)
            if mine and where.node is not None and record.at >= newest.get(where.node, (record.at,))[0]:
                newest[where.node] = (record.at, record)
        nodes, found = history.across("gradient", ("max", "mean"), round_)
        assert nodes == sorted(newest, key=["c1", "c2", "c10", "server"].index)
        assert found.shape == (len(nodes), len(history.layers("gradient")), 2)
        for i, node in enumerate(nodes):
            record = newest[node][1]
            stored = replace(record, matrix=unpack("gradient", pack("gradient", record.matrix)))
            names = (TABLE if record.table == TABLE.digest else OTHER).names
            for j, layer in enumerate(history.layers("gradient")):
                wanted = [stored.get(s)[names.index(layer)] if layer in names else math.nan for s in ("max", "mean")]
                assert same(found[i, j], np.array(wanted))
