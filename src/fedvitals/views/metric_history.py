# SPDX-License-Identifier: Apache-2.0
"""One metric over everything: what a profile or a comparison needs, in one statement instead of one for each round."""

from __future__ import annotations

from fedvitals.protocols import Node
from fedvitals.store.read.metrics import values_of_everybody
from fedvitals.store.read.reader import Reader

Course = dict[int, float]
"""Values by round, in the order of the rounds."""


def courses(reader: Reader, run: str, name: str) -> dict[Node | None, Course]:
    """Every node's newest value of a metric in each round; None is the whole federation, and comes first."""
    return values_of_everybody(reader, run, name)


def whole(reader: Reader, run: str, name: str) -> Course:
    """The federation's own values of a metric, by round; none where only clients have it."""
    return courses(reader, run, name).get(None, {})
