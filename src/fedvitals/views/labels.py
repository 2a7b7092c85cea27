# SPDX-License-Identifier: Apache-2.0
"""Labels nodes that are known by a number of twenty digits with their partition, if they reported one.

Addresses, JSON and stores identify a node by its id; a label is only shown beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fedvitals.diagnosis.cases import Case
from fedvitals.errors import ConfigError, unknown
from fedvitals.store.read.events import newest_event_arrival, newest_event_of_each_node, rounds_of_events
from fedvitals.store.read.reader import Reader
from fedvitals.views.memo import remembered
from fedvitals.views.short_ids import short

PARTITION = "client.partition"


def labels_of(reader: Reader, run: str) -> Mapping[str, str]:
    """Return the label of each node that reported its partition: «partition 3», from its newest report.

    A SuperNode that reconnects under another id keeps its partition; its previous id is then labelled «partition 3
    until round 7».
    """
    newest, any_label = newest_event_arrival(reader, PARTITION)  # no new event means no new label
    return remembered(reader, "labels", run, newest, lambda: _read(reader, run)) if any_label else {}


def _read(reader: Reader, run: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for event in newest_event_of_each_node(reader, run, PARTITION):
        number = event.data.get("partition")  # a client may have reported anything
        if event.where.node is not None and type(number) is int and 0 <= number < 2**53:
            labels[event.where.node] = f"partition {number}"
    if len(set(labels.values())) == len(labels):
        return labels
    rounds = rounds_of_events(reader, run, PARTITION)
    newest: dict[str, int] = {}  # by label: the first round of the node that has it now
    for node, label in labels.items():
        first, _ = rounds.get(node, (0, 0))
        newest[label] = max(first, newest.get(label, 0))
    return {
        node: f"{label} until round {rounds[node][1]}" if rounds.get(node, (0, 0))[1] < newest[label] else label
        for node, label in labels.items()
    }


def named(node: str, labels: Mapping[str, str]) -> str:
    """Return the full name and its label: «18418001853788474769 (partition 3)»."""
    return f"{node} ({labels[node]})" if node in labels else node


def place_of(case: Case, labels: Mapping[str, str]) -> str:
    """Return where a case is, with the label of its node."""
    return case.place if case.node is None else named(case.node, labels) + case.place[len(case.node) :]


def node_of(asked: str, known: Collection[str], labels: Mapping[str, str]) -> str:
    """Return the node that a user means by its name, or by its label or last digits if these are unique."""
    tail = f"…{asked.removeprefix('…')}"
    meant = [asked] if asked in known else [node for node in known if labels.get(node) == asked or short(node) == tail]
    if len(meant) != 1:
        raise ConfigError(unknown("node", asked, known))
    return meant[0]
