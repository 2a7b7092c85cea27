# SPDX-License-Identifier: Apache-2.0
"""One metric over everything: what a profile or a comparison needs, in one statement instead of one for each round."""

from __future__ import annotations

import math

from fedvitals.protocols import Node
from fedvitals.records import natural
from fedvitals.store.read.reader import Reader

Course = dict[int, float]
"""Values by round, in the order of the rounds."""


def courses(reader: Reader, run: str, name: str) -> dict[Node | None, Course]:
    """Every node's newest value of a metric in each round; None is the whole federation, and comes first."""
    found = reader.database.rows(
        "SELECT m.node, m.round, m.value FROM metric AS m "
        "WHERE m.run = (SELECT id FROM symbol WHERE text = ?) AND m.name = (SELECT id FROM symbol WHERE text = ?) "
        "AND m.round IS NOT NULL AND m.layer IS NULL "
        # Without a node, only what is about the whole federation: not the whole of one edge or cluster.
        'AND (m.node IS NOT NULL OR m."group" IS NULL) ORDER BY m.round, m.at, m.arrival',
        (run, name),
    )
    by_number: dict[int | None, Course] = {}
    for place, number, value in found:
        by_number.setdefault(place, {})[number] = math.nan if value is None else value
    by_node: dict[Node | None, Course] = {
        None if place is None else reader.names.texts([place])[0]: course for place, course in by_number.items()
    }
    order = sorted((node for node in by_node if node is not None), key=natural)
    return {node: by_node[node] for node in ([None] if None in by_node else []) + order}


def whole(reader: Reader, run: str, name: str) -> Course:
    """The federation's own values of a metric, by round; none where only clients have it."""
    return courses(reader, run, name).get(None, {})
