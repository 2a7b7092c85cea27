# SPDX-License-Identifier: Apache-2.0
"""A detector for clients that train fewer steps than the others."""

from collections.abc import Iterator
from statistics import median
from typing import Any

import fedvitals as fv

SHARE = 0.5  # of the median client's steps; fewer is a finding
FEWEST_CLIENTS = 3  # a median of fewer says nothing


def few_steps(history: Any, round_index: int) -> Iterator[fv.Finding]:
    """Find the clients that trained less than half as many steps as the median client of the round.

    `history` has what was measured up to the round; see `fedvitals.protocols.History`.
    """
    steps = history.latest("steps", round_index)
    if len(steps) < FEWEST_CLIENTS:
        return
    usual = median(steps.values())
    for node, count in steps.items():
        if count < SHARE * usual:
            yield fv.Finding(
                where=fv.Where(run="", round=round_index, node=node),  # the monitor fills in the run and the time
                at=0.0,
                issue="FEW_STEPS",
                severity="warning",
                confidence=0.9,
                message=f"{node} trained {count:g} steps, the median client {usual:g}.",
                evidence={"steps": count, "median": usual},
            )
