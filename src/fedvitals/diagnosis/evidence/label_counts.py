# SPDX-License-Identifier: Apache-2.0
"""The label histograms that clients report, counted once: each round adds only those that are new.

Clients report their labels when they first take part, and again when these change. All histograms are kept as one
matrix, which grows with the clients whose reports the history still holds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np

from fedvitals.data_change import vanished_labels
from fedvitals.diagnosis.history_cutoff import shared, state_of
from fedvitals.protocols import History, Node
from fedvitals.records import Event, is_client
from fedvitals.stats import Array

FEWEST_REPORTS = 3  # clients that report labels, for one of them to be left out
FEWEST_HOLDERS = 3  # other clients with samples of a label, for losses on it to be compared
_FEWEST_ROWS = 16
MOST_LABELS = 20_000  # known ones, from which those that no client names any more are dropped


class LabelCounts:
    """Each client's newest histogram: `counts[i]` holds the samples of `nodes[i]` for each label of `labels`."""

    def __init__(self) -> None:
        self.version = 0  # increases with every change
        self._clear()

    def _clear(self) -> None:
        self.version += 1
        self.histograms: dict[Node, Mapping[str, int]] = {}
        self.vanished: dict[Node, frozenset[str]] = {}  # labels that a client lost, while it lost no other samples
        self.labels: list[str] = []
        self._events: Sequence[Event] = ()
        self._newest: dict[Node, Event] = {}
        self._rows: dict[Node, int] = {}
        self._columns: dict[str, int] = {}
        self._in_use = 0  # labels, when they were last counted
        self._counts = np.zeros((0, 0))
        self._entropies: dict[Node, float] = {}

    @property
    def nodes(self) -> list[Node]:
        """The clients, in the order of their first report."""
        return list(self._rows)

    @property
    def classes(self) -> int:
        """How many classes there are, by at least two clients' reports if several report any.

        A client with more labels of its own than all others have together has no class labels, or invents some.
        """
        if len(self._rows) < FEWEST_REPORTS:
            return len(self.labels)
        held = self.counts > 0
        alone = held & (held.sum(axis=0) == 1)
        largest = int(alone.sum(axis=1).max(initial=0))
        return len(self.labels) - largest if 2 * largest > len(self.labels) else len(self.labels)

    @property
    def counts(self) -> Array:
        """Samples, [clients, labels]; 0 for a label that a client does not list."""
        return self._counts[: len(self._rows), : len(self.labels)]

    def entropy(self, node: Node) -> float:
        """Return the entropy of a client's labels; NaN if it does not report them."""
        if node not in self._entropies and node in self.histograms:
            self._entropies[node] = _entropy(self.histograms[node])
        return self._entropies.get(node, float("nan"))

    def distance_to_others(self, node: Node) -> float:
        """Return the share of a client's labels that differ from the others' distribution; NaN if it is not known."""
        row = self._rows.get(node)
        if row is None or len(self._rows) < 2:
            return math.nan
        own, whole = self.counts[row], self.counts.sum(axis=0)
        shares = own / max(own.sum(), 1.0) - (whole - own) / max((whole - own).sum(), 1.0)
        return float(np.abs(shares).sum() / 2)

    def update(self, events: Sequence[Event]) -> None:
        """Add all reports, as the events of that name, oldest first."""
        before, self._events = self._events, ()
        gone = next((i for i, event in enumerate(before) if event is events[0]), len(before)) if events else len(before)
        if len(before) - gone > len(events) or not all(map(operator.is_, before[gone:], events)):  # one came late
            self._clear()
            before, gone = (), 0
        self._forget(before[:gone])
        for event in events[len(before) - gone :]:
            self._add(event)
        self._events = events  # only once all of them could be read

    def _forget(self, events: Sequence[Event]) -> None:
        """Drop the clients whose newest reports are no longer among the events."""
        nodes = {event.where.node for event in events if self._newest.get(event.where.node or "") is event}
        if not nodes:
            return
        self.version += 1
        kept = [node for node in self._rows if node not in nodes]
        self._counts = self._counts[[self._rows[node] for node in kept]]
        self._rows = {node: row for row, node in enumerate(kept)}
        for by_client in (self.histograms, self.vanished, self._newest, self._entropies):
            for node in nodes:
                by_client.pop(node or "", None)

    def _add(self, event: Event) -> None:
        node, histogram = event.where.node, event.data.get("histogram")
        if node is None or not histogram:
            return
        self.version += 1
        vanished = vanished_labels(self.histograms.get(node, {}), histogram, self.vanished.pop(node, frozenset()))
        if vanished:
            self.vanished[node] = vanished
        self.histograms[node], self._newest[node] = histogram, event
        self._entropies.pop(node, None)
        row = self._rows.setdefault(node, len(self._rows))
        for label in histogram:
            if label not in self._columns:
                self._columns[label] = len(self.labels)
                self.labels.append(label)
        if len(self.labels) > max(MOST_LABELS, 2 * self._in_use):
            self._drop_unused_labels()
        self._reserve()
        self._counts[row] = 0.0
        self._counts[row, [self._columns[label] for label in histogram]] = [float(n) for n in histogram.values()]

    def _drop_unused_labels(self) -> None:
        """Forget the labels that no client names any more: one with other labels each time would fill our memory."""
        used = {label for histogram in self.histograms.values() for label in histogram}
        before, self.labels = self._columns, [label for label in self.labels if label in used]
        self._columns = {label: place for place, label in enumerate(self.labels)}
        known = [label for label in self.labels if before[label] < self._counts.shape[1]]  # the others are new
        counts = np.zeros((self._counts.shape[0], len(self.labels)))
        counts[:, [self._columns[label] for label in known]] = self._counts[:, [before[label] for label in known]]
        self._counts, self._in_use = counts, len(self.labels)

    def _reserve(self) -> None:
        """Make room for all known clients and labels."""
        rows, columns = self._counts.shape
        if len(self._rows) > rows or len(self.labels) > columns:
            rows = max(_FEWEST_ROWS, 2 * rows) if len(self._rows) > rows else rows
            counts = np.zeros((rows, max(columns, len(self.labels))))
            counts[: self._counts.shape[0], :columns] = self._counts
            self._counts = counts


@shared
def label_counts(history: History, round_index: int) -> LabelCounts:
    """Return the clients' histograms, as last reported up to a round. The result must not be modified."""
    counts = state_of(history, LabelCounts)
    counts.update([event for event in history.events("labels") if (event.where.round or 0) <= round_index])
    return counts


@shared
def clients_with_rare_labels(history: History, round_index: int) -> frozenset[Node]:
    """Return the clients most of whose samples have labels that fewer than three others have.

    A model fits such labels later than others, so losses on them do not tell wrong labels from rare ones.
    """
    labels = label_counts(history, round_index)
    counts = labels.counts
    held = counts > 0
    rare = held.sum(axis=0) - held < FEWEST_HOLDERS  # [clients, labels]: the others that hold it
    alone = 2 * (counts * rare).sum(axis=1) > counts.sum(axis=1)
    return frozenset(node for node, own in zip(labels.nodes, alone.tolist(), strict=True) if own)


def _entropy(histogram: Mapping[str, int]) -> float:
    shares = np.array([count for count in histogram.values() if count > 0], dtype=np.float64)
    shares /= max(shares.sum(), 1.0)
    return float(-(shares * np.log(shares)).sum())


@shared
def predicts_texts(history: History, round_index: int) -> bool:
    """Return whether clients predict the tokens of their texts: they read tokens, and most of them report no labels.

    Unfamiliar texts are hard to predict, but not wrongly labelled.
    """
    reports = label_counts(history, round_index).histograms
    readers = [node for node in history.latest("tokens", round_index) if is_client(node)]
    return len(readers) > 2 * sum(node in reports for node in readers)
