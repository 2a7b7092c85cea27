# SPDX-License-Identifier: Apache-2.0
"""Finds the run to draw: a name or id in a store, or a run of a store that is already open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedvitals.diagnosis.cases import Case, is_trouble
from fedvitals.errors import ConfigError, unknown
from fedvitals.notebook.runs import StoredRun
from fedvitals.records import is_client
from fedvitals.store import Target, open_reader
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.cases import culprits

Which = str | StoredRun | tuple[Reader, str]
"""A run: its id, the beginning of one, or a name (its newest run); one of `fv.open`; or an open store and its id."""


@contextmanager
def opened(run: Which, store: Target = None) -> Iterator[tuple[Reader, str]]:
    """Yield the store, open for the block, and the run's id; ConfigError if there is no such run."""
    if isinstance(run, tuple) and len(run) == 2 and isinstance(run[0], Reader):
        reader, text = run
        yield reader, queries.find_run(reader, text)
        return
    if isinstance(run, StoredRun):
        store, run = run.store, run.id
    if not isinstance(run, str):
        raise ConfigError(f"A run is a name, an id, one of fv.open(...), or (reader, id), got {type(run).__name__}.")
    with open_reader(store) as reader:
        yield reader, queries.find_run(reader, run)


def check_sign(reader: Reader, run: str, sign: str) -> None:
    """Raise ConfigError for a sign that the run does not have; a run without any sign is merely empty."""
    known = queries.metric_names(reader, run)
    if known and sign not in known:
        raise ConfigError(unknown("vital sign of this run", sign, known))


def check_client(reader: Reader, run: str, node: str) -> None:
    """Raise ConfigError for a client that the run does not have."""
    known = [name for name in reader.history(run).nodes() if is_client(name)]
    if node not in known:
        raise ConfigError(unknown("client of this run", node, known))


def suspects(cases: list[Case], most: int) -> list[str]:
    """Return the clients that findings name, worst first: those of warnings and worse, else those of notes."""
    chosen = [case for case in cases if is_trouble(case)] or cases
    named = [node for case in chosen for node in culprits(case) if is_client(node)]
    return list(dict.fromkeys(named))[:most]
