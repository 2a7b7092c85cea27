# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math

import numpy as np

from fedvitals.protocols import History, Sink
from fedvitals.records import Event, Where
from fedvitals.store.in_memory import LATE, MemoryStore
from support.store_contract import RUN, StoreContract, metric, stats


class TestMemory(StoreContract):
    def make(self, folder):
        return MemoryStore(everything=True)

    def make_second(self, store):
        return MemoryStore(everything=True)

    def reopen(self, store):
        return store

    def history(self, store, run="r-1"):
        return store.history(run)

    def read(self, store, kind, run="r-1"):
        return store.records(run, kind)

    def run(self, store, run="r-1"):
        return store.runs[run]


def test_it_is_what_it_says():
    store = MemoryStore()
    assert isinstance(store, Sink)
    assert isinstance(store.history("r"), History)


def test_only_the_newest_rounds_are_kept_where_memory_has_a_limit():
    store, whole = MemoryStore(rounds=20), MemoryStore()
    for number in range(200):
        batch = [
            *(metric(number, f"c{c}", float(number), sequence=10 * number + c) for c in range(3)),
            stats(number, "c1", number, 10 * number + 5),
            Event(Where("r-1", number), number, "info", "round", "", {}, "m", 10 * number + 6),
        ]
        for each in (store, whole):
            each.write([RUN, *batch])
    history, wanted = store.history("r-1"), whole.history("r-1")
    kept = history.rounds()
    assert len(kept) == 20
    assert kept == wanted.rounds()[-len(kept) :]
    rounds, values = history.series("loss", "c1")
    assert (rounds, values) == (kept, [float(number) for number in kept])
    assert history.matrix("gradient", "l2", "conv.bias")[0] == kept
    assert [n for n in range(200) if history.across("gradient", ("l2",), n)[0]] == kept
    assert [event.where.round for event in history.events()] == kept
    assert history.latest("loss", 199) == wanted.latest("loss", 199)
    store.write([metric(1, "c1", 1.0, sequence=11)])  # delivered again, long after
    assert history.latest("loss", 1) == {}


def test_a_series_of_the_run_or_the_server_that_is_kept_is_the_one_read_anew():
    store, numbers = MemoryStore(rounds=100), list(range(400))
    history, sequence = store.history("r-1"), 0
    store.write([RUN])
    for number in numbers:
        late = [number - 1, number - LATE + 1] if number > LATE and number % 3 == 0 else []
        batch = [
            metric(n, node, 10.0 * n + number, sequence=0) for n in (number, *late) for node in (None, "server", "c1")
        ]
        if number % 5 == 0:
            batch = [record for record in batch if record.where.node != "server"]  # which does not report every round
        for record in batch:
            sequence += 1
            store.write([dataclasses.replace(record, at=float(sequence), sequence=sequence)])
        for node in (None, "server", "c1"):
            by_round = store.memory("r-1").metrics["loss"]
            rounds = sorted(n for n, newest in by_round.items() if node in newest)
            assert history.series("loss", node) == (rounds, [by_round[n][node][1] for n in rounds])
            if number % 7:
                break  # they need not be asked for in every round


def test_packed_values_are_those_that_were_written_and_take_in_late_ones():
    store, expected, chance = MemoryStore(), {}, np.random.default_rng(2)
    store.write([RUN])
    for sequence in range(600):
        number = sequence // 10 - (40 if sequence % 17 == 0 and sequence > 420 else 0)
        node = [None, "server", "c1", "c2", "c10"][int(chance.integers(5))]
        at = float(chance.integers(600))
        value = [math.nan, math.inf, float(sequence)][int(chance.integers(3))]
        store.write([dataclasses.replace(metric(number, node, value, sequence=sequence + 1), at=at)])
        before = expected.setdefault(number, {}).get(node)
        if before is None or at >= before[0]:
            expected[number][node] = (at, value)
    by_round = store.memory("r-1").metrics["loss"]
    assert repr({n: dict(newest) for n, newest in by_round.items()}) == repr(expected)
    assert {n for n, newest in by_round.items() if isinstance(newest, dict)} == {*range(60 - LATE, 60)}
    for number, newest in expected.items():
        shown = {node: newest[node][1] for node in ("c1", "c2", "c10", "server") if node in newest}
        assert repr(store.history("r-1").latest("loss", number)) == repr(shown)
