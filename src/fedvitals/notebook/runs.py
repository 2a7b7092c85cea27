# SPDX-License-Identifier: Apache-2.0
"""The runs of a store, read-only, as objects that notebooks show and ask for tables.

    runs = fv.open("runs.db")
    run = runs["demo"]  # or runs.newest
    run.metrics("update.norm", nodes="c7")

Each call opens the store and closes it again: no connection is kept between two cells, and a run that is still training
can be read again for newer data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from fedvitals import html_display as html
from fedvitals.diagnosis.cases import CASE_TITLES, case_cells
from fedvitals.errors import ConfigError, unknown
from fedvitals.notebook.columns import case_columns, layer_columns, metric_columns, node_filter, round_columns
from fedvitals.notebook.tables import AUTO, Columns, as_table
from fedvitals.plural import counted
from fedvitals.records import is_client, natural
from fedvitals.stats import FAMILIES, STATISTICS, statistics_of
from fedvitals.store import Target, open_reader, store_target
from fedvitals.store.postgres import address_of
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import count_runs, newest_run
from fedvitals.store.schema import LAYER_STATISTICS
from fedvitals.views.cases import cases_of
from fedvitals.views.labels import labels_of
from fedvitals.views.status import run_states
from fedvitals.views.units import number, percent
from fedvitals.views.verdict import verdict_of

MOST_RUNS, MOST_CASES = 20, 8  # shown by a display


def open(store: Target = None) -> Runs:  # noqa: A001 - `fv.open`, as users write it
    """Open a store for reading, and return its runs.

    Args:
        store: A file, or an address `postgresql://...`; by default FEDVITALS_STORE, else runs.db in this folder.

    Returns:
        The runs: `runs["name"]`, `runs.newest`, `for run in runs`.

    Raises:
        StoreError: There is no store, or it cannot be read.
    """
    where = store_target(store)
    open_reader(where).close()
    return Runs(where.absolute() if isinstance(where, Path) else where)


class Runs:
    """The runs of a store, the newest first: iterate over them, or take one by name, id or place.

    `runs["demo"]` is the newest run with that name, or the run whose id is or begins with it; `runs[0]` and
    `runs.newest` are the newest of all. No connection is kept between two calls; `with` is allowed, and has nothing to
    close.
    """

    def __init__(self, store: Path | str) -> None:
        self._store = store

    @property
    def newest(self) -> StoredRun:
        """The run that started last; ConfigError if the store has none."""
        with open_reader(self._store) as reader:
            newest = newest_run(reader)
            if newest is None:
                raise ConfigError("The store has no runs yet. `fedvitals demo` makes one.")
            return StoredRun(self._store, queries.summary_of(reader, newest))

    def __getitem__(self, run: str | int) -> StoredRun:
        if isinstance(run, int):
            stored = list(self)
            if not -len(stored) <= run < len(stored):
                raise ConfigError(
                    f"There is no run {run}: the store has {counted(len(stored), 'run')}, and runs[0] is the newest. "
                    'Name one by its place, its name or its id, such as runs["demo"].'
                )
            return stored[run]
        if not isinstance(run, str):
            raise ConfigError(f"A run is a name, an id or its place in the list, got {type(run).__name__}.")
        with open_reader(self._store) as reader:
            return StoredRun(self._store, queries.summary_of(reader, queries.find_run(reader, run)))

    def __iter__(self) -> Iterator[StoredRun]:
        with open_reader(self._store) as reader:
            summaries = queries.list_runs(reader)
        return (StoredRun(self._store, summary) for summary in summaries)

    def __len__(self) -> int:
        with open_reader(self._store) as reader:
            return count_runs(reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def table(self, *, as_: str = AUTO) -> Any:
        """Return one row per run, the newest first.

        Args:
            as_: «pandas», «arrow», «columns», or «auto», as in `StoredRun.metrics`.

        Returns:
            A table with the columns name, id, host, state, started (seconds since the epoch), rounds, clients,
            accuracy, loss and findings.
        """
        summaries, states = self._summaries()
        names = ("name", "id", "host", "started", "rounds", "clients", "accuracy", "loss", "findings")
        columns = {name: [getattr(summary, name) for summary in summaries] for name in names}
        return as_table({**columns, "state": [states[summary.id] for summary in summaries]}, as_)

    def _summaries(self) -> tuple[list[queries.RunSummary], dict[str, Any]]:
        with open_reader(self._store) as reader:
            summaries = [
                replace(summary, findings=len(cases_of(reader, summary.id))) for summary in queries.list_runs(reader)
            ]
            return summaries, {**run_states(reader)}

    def __repr__(self) -> str:
        return f"<{counted(len(self), 'run')} in {_store_name(self._store)}>"

    def _repr_html_(self) -> str:
        summaries, states = self._summaries()
        titles = ("run", "id", "state", "rounds", "clients", "accuracy", "loss", "findings")
        rows = [
            (
                s.name,
                s.id,
                states[s.id],
                s.rounds,
                s.clients,
                percent(s.accuracy),
                number(s.loss),
                s.findings,
            )
            for s in summaries[:MOST_RUNS]
        ]
        more = f"and {len(summaries) - MOST_RUNS} older runs" if len(summaries) > MOST_RUNS else ""
        head = html.heading(counted(len(summaries), "run"), _store_name(self._store))
        return html.display(head, html.table(titles, rows), html.paragraph(more, quiet=True))


class StoredRun:
    """A run of a store: `name`, `id` and `summary` as they were when it was opened; its methods read the store again.

    `fv.plot` accepts it wherever it takes a run.
    """

    def __init__(self, store: Path | str, summary: queries.RunSummary) -> None:
        self.store = store
        self.summary = summary
        self.id, self.name = summary.id, summary.name

    @property
    def verdict(self) -> str:
        """The verdict in a sentence or two: what is wrong, since when and how sure, or that nothing is, or what was
        examined.
        """
        with open_reader(self.store) as reader:
            verdict = verdict_of(reader, self.id)
        return f"{verdict.headline.rstrip('.')}. {verdict.detail}".strip()

    def metric_names(self) -> list[str]:
        """Return the metrics that the run has, sorted; docs/metrics.md says what they mean."""
        with open_reader(self.store) as reader:
            return queries.metric_names(reader, self.id)

    def metrics(
        self,
        *names: str,
        nodes: str | Iterable[str | None] | None = None,
        rounds: int | range | None = None,
        as_: str = AUTO,
    ) -> Any:
        """Return metrics as a long table with one row per metric, node and round.

        Of what was measured several times in a round, the newest counts. A value of NaN was measured as such; what was
        not measured has no row.

        Args:
            names: The names of metrics; without any, all that the run has (see `metric_names`).
            nodes: One name or several, such as «server» or ["c7", "c8"]; None inside a list is the federation as a
                whole. By default all.
            rounds: One round, or a `range`, whose end is excluded; by default all.
            as_: «pandas», «arrow», «columns» (a dictionary of lists), or «auto»: the first of these that is installed.

        Returns:
            A table with the columns round, node, name and value.

        Raises:
            ConfigError: The run has no such metric or node; the message lists those it has.
        """
        return self._table(lambda reader: self._metrics(reader, names, nodes, rounds), as_)

    def _metrics(
        self, reader: Reader, names: Sequence[str], nodes: str | Iterable[str | None] | None, rounds: int | range | None
    ) -> Columns:
        known = queries.metric_names(reader, self.id)
        for name in names:
            _check("metric of this run", name, known)
        return metric_columns(reader, self.id, names or known, self._nodes(reader, nodes), rounds)

    def layers(
        self,
        family: str,
        *statistics: str,
        nodes: str | Iterable[str | None] | None = None,
        rounds: int | range | None = None,
        as_: str = AUTO,
    ) -> Any:
        """Return layer statistics as a table with one row per round, node and layer.

        Statistics of single steps are left out.

        Args:
            family: «gradient», «weight», «update», «activation», or another family of docs/metrics.md.
            statistics: Such as «mean», «std», «l2» or «sparsity»; without any, all of the family.
            nodes: One name or several, as in `metrics`; None inside a list is the federation as a whole, where that was
                recorded.
            rounds: One round, or a `range`, whose end is excluded; by default all.
            as_: «pandas», «arrow», «columns» or «auto», as in `metrics`.

        Returns:
            A table with the columns round, node and layer, and one for each statistic.

        Raises:
            ConfigError: The run has no such family, statistic or node; the message lists those it has.
        """
        return self._table(lambda reader: self._layers(reader, family, statistics, nodes, rounds), as_)

    def _layers(
        self,
        reader: Reader,
        family: str,
        statistics: Sequence[str],
        nodes: str | Iterable[str | None] | None,
        rounds: int | range | None,
    ) -> Columns:
        _check("family of layer statistics of this run", family, queries.layer_families(reader, self.id))
        for statistic in statistics:
            _check(f"statistic of family '{family}'", statistic, statistics_of(family))
        every = LAYER_STATISTICS if FAMILIES[family].columns is STATISTICS else FAMILIES[family].columns
        return layer_columns(reader, self.id, family, statistics or every, self._nodes(reader, nodes), rounds)

    def findings(self, *, notes: bool = False, as_: str = AUTO) -> Any:
        """Return what the detectors found, each problem once, worst first.

        An empty table is no all-clear: `verdict` says what was examined.

        Args:
            notes: Whether to include problems that were never more than a note.
            as_: «pandas», «arrow», «columns» or «auto», as in `metrics`.

        Returns:
            A table with the columns severity, issue, title, node, group, layer, since and last (rounds), still_there,
            confidence, message, and follows_from, the issue and place of the problem that this one is a consequence of.
        """
        return self._table(lambda reader: case_columns(cases_of(reader, self.id, notes=notes)), as_)

    def rounds(self, *, as_: str = AUTO) -> Any:
        """Return one row per round.

        Args:
            as_: «pandas», «arrow», «columns» or «auto», as in `metrics`.

        Returns:
            A table with the columns round, accuracy, loss and seconds. Each value is the federation's own, else the
            server's, else that of the median client.
        """
        return self._table(lambda reader: round_columns(reader.history(self.id)), as_)

    def clients(self, *, as_: str = AUTO) -> Any:
        """Return one row per client.

        Args:
            as_: «pandas», «arrow», «columns» or «auto», as in `metrics`.

        Returns:
            A table with the columns node, label, rounds (how many it took part in), last (the newest of these), and
            findings (how many problems are its own).
        """
        return self._table(self._clients, as_)

    def _clients(self, reader: Reader) -> Columns:
        attended, labels = queries.attendance(reader, self.id), labels_of(reader, self.id)
        troubled = [case.node for case in cases_of(reader, self.id)]
        nodes = sorted((node for node in reader.history(self.id).nodes() if is_client(node)), key=natural)
        return {
            "node": nodes,
            "label": [labels.get(node) for node in nodes],
            "rounds": [len(attended.get(node, ())) for node in nodes],
            "last": [max(attended.get(node, ()), default=None) for node in nodes],
            "findings": [troubled.count(node) for node in nodes],
        }

    def _nodes(self, reader: Reader, nodes: str | Iterable[str | None] | None) -> Callable[[str | None], bool]:
        return node_filter(nodes, reader.history(self.id).nodes())

    def _table(self, read: Callable[[Reader], Columns], form: str) -> Any:
        with open_reader(self.store) as reader:
            columns = read(reader)
        return as_table(columns, form)

    def __repr__(self) -> str:
        return f"<run {self.name!r}, {self.id}: {_size(self.summary)}>"

    def _repr_html_(self) -> str:
        with open_reader(self.store) as reader:
            summary, state = queries.summary_of(reader, self.id), run_states(reader)[self.id]
            verdict, cases = verdict_of(reader, self.id), cases_of(reader, self.id)
        began = time.strftime("%d %b %Y %H:%M", time.localtime(summary.started))
        learnt = f"accuracy {percent(summary.accuracy)}" if summary.accuracy is not None else ""
        facts = [fact for fact in (self.id, f"{state}, begun {began}", _size(summary), learnt) if fact]
        more = f"and {len(cases) - MOST_CASES} more: run.findings()" if len(cases) > MOST_CASES else ""
        return html.display(
            html.heading(self.name, *facts),
            html.paragraph(verdict.headline),
            html.paragraph(verdict.why),
            html.paragraph(f"Next step: {verdict.next_step}" if verdict.next_step else ""),
            html.paragraph(verdict.detail, quiet=True),
            html.table(CASE_TITLES, map(case_cells, cases[:MOST_CASES])),
            html.paragraph(more, quiet=True),
        )


def _check(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ConfigError(unknown(what, name, known))


def _size(summary: queries.RunSummary) -> str:
    return f"{counted(summary.rounds, 'round')}, {counted(summary.clients, 'client')}"


def _store_name(store: Path | str) -> str:
    """Return the store's file, or its address without the password."""
    return address_of(str(store)).shown
