# SPDX-License-Identifier: Apache-2.0
"""Reads a metric of all clients in one walk over an index, and caches it, so that only new rows are read later."""

from __future__ import annotations

import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedvitals.diagnosis.cases import MODEL_LOST
from fedvitals.records import is_client
from fedvitals.store.read import metrics
from fedvitals.store.read.queries import rounds_with_findings
from fedvitals.store.read.reader import Reader
from fedvitals.store.upkeep.removal import removals
from fedvitals.views.cohort import EMPTY, Floats, Matrix, Reals, Whole, by_name, compact, single

__all__ = ["Matrices", "Matrix", "is_held", "metric_matrix", "rounds_not_finite", "share"]

BYTES = 256_000_000  # size of the cached matrices
NEWS = 200_000  # new rows; with more, a walk over all is faster, and takes less memory
WAITING = 2000  # rows that may wait until a metric is requested, or a quarter of the metric's size, if that is more
SEEKS = 2000  # for single cells; beyond that a walk over all is faster


@dataclass(slots=True)
class _Held:
    """A metric as it was last read, with nodes by number, in the order of their names."""

    nodes: Whole
    matrix: Matrix


def _read(reader: Reader, run: int, name: int, until: int) -> _Held:
    """Read all of one metric. Rows become arrays one by one: as objects, those of a long run would take megabytes."""
    gathered = reader.database.dialect.gathered
    rounds, values, who = array("q"), array("d"), list[Whole]()
    before: tuple[Any, Whole] = (None, np.empty(0, np.int64))
    for round_index, nodes, packed in metrics.gathered_by_round(reader, run, name, until):
        if nodes != before[0]:  # often the same as in the previous round
            numbers = gathered(nodes)
            if len({*numbers}) < len(numbers):  # a node reported twice in one round
                return _read_newest(reader, run, name, until)
            before = nodes, np.array(numbers, np.int64)
        rounds.append(round_index)
        who.append(before[1])
        values.frombytes(np.array(gathered(packed), float).tobytes())
    if not rounds:
        return _Held(np.empty(0, np.int64), EMPTY)
    column = np.repeat(np.arange(len(rounds)), [*map(len, who)])
    return _placed(reader, np.array(rounds), column, np.concatenate(who), np.array(values))


def _read_newest(reader: Reader, run: int, name: int, until: int) -> _Held:
    """Read a metric if the order of reports matters."""
    places, values = metrics.newest_values(reader, run, name, until)
    rounds, column = np.unique(places[:, 0], return_inverse=True)
    return _placed(reader, rounds, column, places[:, 1], values)


def _placed(reader: Reader, rounds: Whole, column: Whole, nodes: Whole, numbers: Reals) -> _Held:
    """Return values as a matrix, given the index of the round and the node of each."""
    present = np.zeros(int(nodes.max()) + 1, bool)  # numbers of names are small: no need to sort a million
    present[nodes] = True
    known, row = np.flatnonzero(present), (np.cumsum(present) - 1)[nodes]
    values = np.full((len(known), len(rounds)), np.nan, np.float32)
    there = np.zeros(values.shape, bool)
    values[row, column], there[row, column] = single(numbers), True
    return _arranged(reader, known, rounds, values, there)


def _arranged(reader: Reader, nodes: Whole, rounds: Whole, values: Floats, there: Any) -> _Held:
    """Return clients only, in the order of their names, without rounds that have none of them."""
    names = reader.names.texts(nodes.tolist())
    order = [i for i in by_name(names) if is_client(names[i])]
    values, there = values[order], there[order]
    some = there.any(axis=0)
    if not some.all():
        rounds, values, there = rounds[some], values[:, some], there[:, some]
    matrix = Matrix(tuple(names[i] for i in order), compact(rounds.tolist()), values, there)
    return _Held(nodes[order], matrix)


def _grown(reader: Reader, held: _Held, nodes: Whole, rounds: Whole) -> tuple[_Held, Whole]:
    """Return the metric with room for these nodes and rounds, and the rounds as an array."""
    before = np.asarray(held.matrix.rounds, np.int64)
    later = rounds[rounds > before[-1]] if len(before) else rounds
    if len(before) and np.isin(nodes, held.nodes).all() and np.isin(rounds[: len(rounds) - len(later)], before).all():
        unchanged = int(np.searchsorted(before, rounds[0]))  # usually all, or all but the newest
        return _Held(held.nodes, held.matrix.grown(later.tolist(), unchanged)), np.append(before, later)
    columns = np.union1d(before, rounds)
    numbers = np.concatenate([held.nodes, np.setdiff1d(nodes, held.nodes)])
    values = np.full((len(numbers), len(columns)), np.nan, np.float32)
    there = np.zeros(values.shape, bool)
    here = np.ix_(np.arange(len(held.nodes)), np.searchsorted(columns, before))
    values[here], there[here] = held.matrix.values, held.matrix.there
    if len(numbers) > len(held.nodes):
        names = reader.names.texts(numbers.tolist())
        order = by_name(names)
        numbers, values, there = numbers[order], values[order], there[order]
        labels = tuple(names[i] for i in order)
    else:
        labels = held.matrix.nodes
    return _Held(numbers, Matrix(labels, compact(columns.tolist()), values, there)), columns


def _added(reader: Reader, key: tuple[int, int], held: _Held, news: Reals, until: int) -> _Held:
    """Return the metric with its new rows: round, node and value of each; the key is run and name."""
    nodes = news[:, 1].astype(np.int64)
    known = np.unique(nodes)
    clients = {n for n, text in zip(known.tolist(), reader.names.texts(known.tolist()), strict=True) if is_client(text)}
    mine = np.isin(nodes, np.array(sorted(clients), np.int64))
    news, nodes = news[mine], nodes[mine]
    if not len(news):
        return held
    rounds = news[:, 0].astype(np.int64)
    grown, columns = _grown(reader, held, np.unique(nodes), np.unique(rounds))
    order = np.argsort(grown.nodes)
    rows = order[np.searchsorted(grown.nodes, nodes, sorter=order)]
    cells = rows * len(columns) + np.searchsorted(columns, rounds)
    values, there = grown.matrix.values.reshape(-1), grown.matrix.there.reshape(-1)
    different, counts = np.unique(cells, return_counts=True)
    twice = different[(counts > 1) | there[different]]
    if len(twice) > SEEKS:
        return _read(reader, *key, until)
    values[cells], there[cells] = single(news[:, 2]), True
    for cell in twice.tolist():
        row, column = divmod(cell, len(columns))
        node, round_index = int(grown.nodes[row]), int(columns[column])
        values[cell] = single(metrics.newest_in_cell(reader, *key, node, round_index, until))
    return grown


class _Run:
    """The cache for one run: all its metrics are as of the same arrival."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.until = -1
        self.metrics: dict[int, _Held] = {}
        self.waiting: dict[int, list[Reals]] = {}  # new rows of a metric since it was last requested
        self.readings: dict[int, threading.Lock] = {}  # a metric is read once, even if requested several times at once

    def matrix(self, reader: Reader, run: int, name: int) -> Matrix:
        held, _ = self._known(reader, run, name)
        if held is not None:
            return held.matrix
        with self.readings.setdefault(name, threading.Lock()):
            held, until = self._known(reader, run, name)
            while held is None:
                # Slow, hence without the run's lock: several metrics are read at once.
                read = _read(reader, run, name, until)
                with self.lock:
                    if until <= self.until:
                        held = self.metrics[name] = _updated(reader, (run, name), read, until, self.until)
                        self.waiting.pop(name, None)
                if held is None:  # rows were removed in between
                    held, until = self._known(reader, run, name)
        return held.matrix

    def _known(self, reader: Reader, run: int, name: int) -> tuple[_Held | None, int]:
        """Return a metric's current state, if it is cached, and up to which arrival all cached ones are."""
        with self.lock:
            newest = metrics.newest_metric_arrival(reader, run, self.until)
            if newest < self.until or newest - self.until > NEWS:
                self.metrics.clear()
                self.waiting.clear()
            elif newest > self.until and self.metrics:
                news = _news(reader, run, list(self.metrics), self.until, newest)
                for metric in list(self.metrics):
                    mine = news[news[:, 0] == metric][:, 1:]
                    if len(mine):
                        self._wait(metric, mine)
            self.until = newest
            held, mine = self.metrics.get(name), self.waiting.pop(name, [])
            if held is not None and mine:
                held = self.metrics[name] = _added(reader, (run, name), held, np.concatenate(mine), newest)
            return held, newest

    def _wait(self, name: int, news: Reals) -> None:
        """Keep new rows until the metric is requested; a metric not requested for long is dropped, and read again then.

        Otherwise everything ever read, or read ahead, would grow with each round of a run that is being viewed.
        """
        waiting = self.waiting.setdefault(name, [])
        waiting.append(news)
        if sum(map(len, waiting)) > max(WAITING, self.metrics[name].matrix.values.size // 4):
            del self.waiting[name], self.metrics[name]


def _news(reader: Reader, run: int, names: Sequence[int], since: int, until: int) -> Reals:
    """Return name, round, node and value of these metrics' new rows."""
    return np.array(metrics.values_between(reader, run, names, since, until), float).reshape(-1, 4)


def _updated(reader: Reader, key: tuple[int, int], held: _Held, since: int, until: int) -> _Held:
    if since == until:
        return held
    if until - since > NEWS:
        return _read(reader, *key, until)
    mine = _news(reader, key[0], [key[1]], since, until)[:, 1:]
    return _added(reader, key, held, mine, until) if len(mine) else held


class Matrices:
    """Cached metrics of one store, for any number of threads; each thread uses its own reader.

    When rows are removed from the store, the cache is cleared: this is detected here or, without `notice`, by the
    owner, which then calls `forget`.
    """

    def __init__(self, most: int = BYTES, *, notice: bool = True) -> None:
        self._most = most
        self._notice = notice
        self._lock = threading.Lock()
        self._epoch: object = None
        self._runs: dict[str, _Run] = {}
        self._memory: dict[Any, Any] = {}
        self._used: OrderedDict[tuple[str, int], int] = OrderedDict()  # bytes, least recently used first

    def matrix(self, reader: Reader, run: str, name: str) -> Matrix:
        """Return every client's newest value of a metric in each round."""
        number, metric = reader.names.number(run), reader.names.number(name)
        if number is None or metric is None:
            return EMPTY
        self._look(reader)
        with self._lock:
            remembered = self._runs.setdefault(run, _Run())
        matrix = remembered.matrix(reader, number, metric)
        self._note(run, metric, matrix.nbytes)
        return matrix

    def holds(self, reader: Reader, run: str, name: str) -> bool:
        """Whether that metric is available without reading all of it."""
        self._look(reader)
        known = self._runs.get(run)
        return known is not None and reader.names.number(name) in known.metrics

    def _look(self, reader: Reader) -> None:
        """Clear the cache if rows were removed."""
        if self._notice and (epoch := removals(reader.database)) != self._epoch:
            self.forget()
            self._epoch = epoch

    def forget(self) -> None:
        """Clear the cache: rows were removed, and their numbers may be used again."""
        with self._lock:
            self._runs.clear()
            self._used.clear()
            self._memory = {}

    def memory(self, reader: Reader) -> dict[Any, Any]:
        """Return a memory for other sums over new rows; emptied when rows are removed."""
        self._look(reader)
        return self._memory

    def _note(self, run: str, metric: int, size: int) -> None:
        """Drop what was least recently used, if the cache is too large."""
        with self._lock:
            self._used[run, metric] = size
            self._used.move_to_end((run, metric))
            total = sum(self._used.values())
            while total > self._most and len(self._used) > 1:
                (old, gone), bytes_ = self._used.popitem(last=False)
                total -= bytes_
                if old in self._runs:
                    self._runs[old].metrics.pop(gone, None)


_SHARED: weakref.WeakKeyDictionary[Reader, Matrices] = weakref.WeakKeyDictionary()


def share(reader: Reader, matrices: Matrices) -> None:
    """Let `metric_matrix` use this cache with this reader."""
    _SHARED[reader] = matrices


def is_held(reader: Reader, run: str, name: str) -> bool:
    """Whether `metric_matrix` has the metric without reading all of it."""
    shared = _SHARED.get(reader)
    return shared is not None and shared.holds(reader, run, name)


def metric_matrix(reader: Reader, run: str, name: str) -> Matrix:
    """Return every client's newest value of a metric in each round, cached if the reader shares `Matrices`.

    The norm of values that are not finite is NaN.
    """
    matrix = (_SHARED.get(reader) or Matrices()).matrix(reader, run, name)
    lost = rounds_not_finite(reader, run, name)
    rows = [(row, lost[node]) for row, node in enumerate(matrix.nodes) if node in lost]
    if not rows:
        return matrix
    values, rounds = matrix.values.copy(), np.asarray(matrix.rounds)
    for row, own in rows:
        values[row, np.isin(rounds, [*own])] = np.nan
    return Matrix(matrix.nodes, matrix.rounds, values, matrix.there)


# Norm → the count of NaN and Inf among its values.
_COUNTS = {
    "gradient.norm": "gradient.nonfinite",
    "gradient.norm_max": "gradient.nonfinite",
    "gradient.norm_last": "gradient.nonfinite",
    "weight.norm": "weight.nonfinite",
    "weight.drift": "weight.nonfinite",
    "weight.update_ratio": "weight.nonfinite",
    "update.norm": "update.nonfinite",
}


def rounds_not_finite(reader: Reader, run: str, name: str) -> Mapping[str, set[int]]:
    """Return the rounds in which each node's metric is the norm of values some of which are NaN or infinite.

    Kernels only sum finite values, so that the norm of NaNs is stored as 0; shown as 0 it would be the opposite of what
    happened. Only rounds with a finding of NaN are checked.
    """
    counted = _COUNTS.get(name)
    rounds = () if counted is None else rounds_with_findings(reader, run, MODEL_LOST)
    if counted is None or not rounds:
        return {}
    memory, key = memory_of(reader), ("not finite", run, counted)
    if memory.get(key, (None,))[0] != rounds:
        memory[key] = rounds, metrics.rounds_above_zero(reader, run, counted, rounds)
    lost: Mapping[str, set[int]] = memory[key][1]
    return lost


def memory_of(reader: Reader) -> dict[Any, Any]:
    """Return the memory shared by requests that use a reader's `Matrices`; else an empty one."""
    shared = _SHARED.get(reader)
    return {} if shared is None else shared.memory(reader)
