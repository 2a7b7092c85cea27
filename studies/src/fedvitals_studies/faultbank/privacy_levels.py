# SPDX-License-Identifier: Apache-2.0
"""A recording as it would have been at a lower privacy level, by the gate of `transport.privacy`.

Bank runs are recorded at level 3. What may not leave a client at a lower level is removed: scalars and layer statistics
by the catalogue's levels, events by the gate itself. What the server computes from the updates that it holds stays,
except comparisons with what the client says it trained, since that needs the client's layer statistics. Means and sums
over clients stay if they include at least `LEAST_CLIENTS` clients.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fedvitals.catalog import is_update_family, is_update_metric, level_of_metric
from fedvitals.records import Event
from fedvitals.stats import FAMILIES
from fedvitals.transport.privacy import LEAST_CLIENTS, SUMS, PrivacyPolicy, released
from fedvitals_studies.faultbank.lying import COMPARED
from fedvitals_studies.faultbank.recording import ABSENT, SERVER, Recording, Small

LAYERS = 3  # the level of what clients report of their layers


def at_level(recording: Recording, level: int) -> Recording:
    """Return what would have been released at this level."""
    policy = PrivacyPolicy(level, tracebacks=False)
    server = np.array([name == SERVER for name in recording.names], np.bool_)
    events = [released(event, policy) for event in recording.told]
    return replace(
        recording,
        metrics={
            name: table if _released(name, level) else _without_clients(table, server, level)
            for name, table in recording.metrics.items()
        },
        whole={
            name: line if _released(name, level) else _of_many(line, recording.metrics.get(name), server, level)
            for name, line in recording.whole.items()
        },
        families={
            name: block
            if is_update_family(name) or level >= FAMILIES[name].level
            else _without_clients(block, server, level)
            for name, block in recording.families.items()
        },
        told=[event for event in events if isinstance(event, Event)],
    )


def _released(metric: str, level: int) -> bool:
    if metric in COMPARED:
        return level >= LAYERS
    return is_update_metric(metric) or level >= level_of_metric(metric)


def _reporting(table: Small, server: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return how many clients have a value in each round."""
    there = (table != ABSENT).reshape(*table.shape[:2], -1).any(axis=2)
    return np.asarray((there & ~server).sum(axis=1))


def _without_clients(table: Small, server: npt.NDArray[np.bool_], level: int) -> Small:
    """Return [rounds, nodes, ...] without the clients; the server's row stays if its own, or over many clients."""
    count = _reporting(table, server)
    keeps = (count == 0) | ((count >= LEAST_CLIENTS) & (level >= SUMS))
    kept = keeps[:, None] & server[None]
    return np.where(kept.reshape(*kept.shape, *(1,) * (table.ndim - 2)), table, ABSENT).astype(np.float32)


def _of_many(line: Small, clients: Small | None, server: npt.NDArray[np.bool_], level: int) -> Small:
    """Return [rounds], where a value that no client reports is the server's own."""
    if clients is None:
        return line
    count = _reporting(clients, server)
    keeps = (count == 0) | ((count >= LEAST_CLIENTS) & (level >= SUMS))
    return np.where(keeps, line, ABSENT).astype(np.float32)
