# SPDX-License-Identifier: Apache-2.0
"""The tools that an agent may call: each reads the one store that the server was started with, and changes nothing.

A tool's name, parameters and docstring are what the agent reads. Every answer is JSON of at most `LIMIT` bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from fedvitals.agents import documentation
from fedvitals.agents.answers import LIMIT, TEXT, encode, quoted
from fedvitals.agents.deviations import SYSTEM, Deviation, deviation_of, order, signs_of, strongest
from fedvitals.agents.layers import layer_summary, layer_table
from fedvitals.dashboard.pages.tape_index import NoTapeError
from fedvitals.dashboard.pages.what_if import what_if
from fedvitals.errors import ConfigError, StoreError, unknown
from fedvitals.records import natural
from fedvitals.store import Target, open_reader
from fedvitals.store.read import queries
from fedvitals.store.read.ask import query as ask
from fedvitals.store.read.events import failures
from fedvitals.store.read.reader import Reader
from fedvitals.views.card import VITAL_SIGNS, vital_sign
from fedvitals.views.comparison.runs import compare
from fedvitals.views.findings import FindingsAsked, finding_details, findings_page
from fedvitals.views.profile import profile_of
from fedvitals.views.round import round_page, round_table
from fedvitals.views.status import run_states

ROWS = 40  # rows of a table, unless fewer are asked for
POINTS = 12  # values shown of a series
SECONDS = 10.0  # limit of an agent's own statement
CELL = 8 << 20  # bytes of one value while a statement runs
Run = Annotated[
    str, Field(max_length=300, description="Id of a run, its beginning, or its name (then its newest run).")
]
Client = Annotated[str, Field(max_length=1000, description="Name of a client, as `overview` or `evidence` has it.")]
Rows = Annotated[int, Field(ge=1, le=200, description="At most so many rows.")]


class Tools:
    """The tools over one store. `entries` are searched by `search_docs` in addition to the package's documentation."""

    def __init__(self, store: Target, entries: Sequence[documentation.Entry] = (), limit: int = LIMIT) -> None:
        self._store = store
        self._entries = tuple(entries)
        self._limit = limit

    def all(self) -> tuple[Callable[..., str], ...]:
        """Return the tools in the order in which an agent should see them."""
        return (
            self.runs, self.overview, self.evidence, self.client, self.layer, self.round, self.findings, self.profile,
            self.compare, self.what_if, self.query, self.search_docs,
        )  # fmt: skip

    def _encode(self, result: Any) -> str:
        return encode(result, self._limit)

    def _open(self) -> Reader:
        return open_reader(self._store, patience=SECONDS)

    def runs(self, limit: Rows = 20) -> str:
        """List the runs of the store, the newest first: id, name, state, rounds, clients, accuracy and loss."""
        with self._open() as reader:
            every_run, states = queries.list_runs(reader), run_states(reader)
        rows = [
            {"id": run.id, "name": run.name, "state": states[run.id], "host": run.host, "rounds": run.rounds,
             "clients": run.clients, "accuracy": run.accuracy, "loss": run.loss, "seconds": run.seconds}
            for run in every_run[:limit]
        ]  # fmt: skip
        return self._encode({"runs": rows, "total": len(every_run)})

    def overview(self, run: Run) -> str:
        """Summarise a run without judging it: rounds, clients, the vital signs of the whole federation over the rounds,
        and who failed or was absent. Start here; then `evidence` shows which client differs."""
        with self._open() as reader:
            chosen = queries.find_run(reader, run)
            summary, history = queries.summary_of(reader, chosen), reader.history(chosen)
            signs = [sign for name in VITAL_SIGNS if (sign := vital_sign(history, name)).rounds]
            attended = queries.attendance(reader, chosen)
            rounds = history.rounds()
            troubles = failures(reader, chosen)
        absent = [
            {"client": node, "attended": len(own), "of": len(rounds)}
            for node, own in sorted(attended.items(), key=lambda entry: len(entry[1]))
            if node is not None and node != "server" and len(own) < len(rounds)
        ]
        return self._encode({
            "run": chosen, "name": summary.name, "host": summary.host, "topology": summary.topology,
            "rounds": [rounds[0], rounds[-1]] if rounds else [], "clients": summary.clients,
            "finished": summary.finished is not None, "seconds": summary.seconds, "lost_records": summary.lost,
            "signs": [_series(s.name, s.of, s.unit, s.rounds, s.values) for s in signs],
            "absent": absent[:10],
            "failures": _failures(troubles)[:10],
            "events_by_level": summary.events,
        })  # fmt: skip

    def evidence(
        self,
        run: Run,
        client: Annotated[str | None, Field(max_length=1000, description="One client; without it, all.")] = None,
        limit: Rows = 25,
    ) -> str:
        """Rank how far clients lie from their peers, sign by sign, in training and in machines and links: score in
        robust standard deviations (above or below by its sign), since which round, the newest value beside the others'
        median. These are measurements of all clients, not findings: in healthy runs somebody differs, too; look for
        a large score that lasts."""
        with self._open() as reader:
            chosen = queries.find_run(reader, run)
            clients = None if client is None else [_known_client(reader, chosen, client)]
            ranked = strongest(reader, chosen, clients)
            rounds = reader.history(chosen).rounds()
        system = [_row(deviation) for deviation in ranked if deviation.sign.startswith(SYSTEM)]
        training = [_row(deviation) for deviation in ranked if not deviation.sign.startswith(SYSTEM)]
        return self._encode({
            "run": chosen, "rounds": [rounds[0], rounds[-1]] if rounds else [], "training": training[:limit],
            "system": system[: max(1, limit // 3)], "compared": len(ranked),
            "signs": sorted({deviation.sign for deviation in ranked}) if client is None else [],
        })  # fmt: skip

    def client(
        self,
        run: Run,
        client: Client,
        sign: Annotated[str | None, Field(max_length=300, description="One sign, with more points.")] = None,
    ) -> str:
        """Show the signs of one client over the rounds beside the median of the other clients, those that deviate most
        first; with `sign`, that one alone and in more points."""
        with self._open() as reader:
            chosen = queries.find_run(reader, run)
            node = _known_client(reader, chosen, client)
            rows = []
            for measured in signs_of(reader, chosen, sign):
                deviation = deviation_of(measured, node)
                if deviation is not None:
                    rows.append((deviation, measured))
            attended = queries.attendance(reader, chosen, [node]).get(node, [])
            failed = _failures([event for event in failures(reader, chosen) if event[0] == node])
        if sign is not None and not rows:
            raise ConfigError(f"The client has no sign '{sign}'. Call `evidence` for the known signs.")
        rows.sort(key=lambda row: order(row[0]))
        points = POINTS if sign is None else 60
        signs = []
        for deviation, measured in rows[: 1 if sign else 12]:
            own_rounds, values = measured.matrix[node]
            usual = dict(zip(measured.matrix.rounds, measured.matrix.band().median, strict=True))
            chosen_rounds = _spread(own_rounds, points)
            by_round = dict(zip(own_rounds, values, strict=True))
            signs.append(
                _row(deviation)
                | {"rounds": chosen_rounds, "values": [by_round[r] for r in chosen_rounds]}
                | {"median_client": [usual[r] for r in chosen_rounds]}
            )
        return self._encode(
            {"run": chosen, "client": node, "attended_rounds": len(attended), "failures": failed, "signs": signs}
        )

    def layer(
        self,
        run: Run,
        layer: Annotated[str | None, Field(max_length=1000, description="One layer; without it, all in short.")] = None,
        client: Annotated[str | None, Field(max_length=1000, description="One client beside the others.")] = None,
    ) -> str:
        """Show the gradients, updates and weights of the model's layers: how each changed from the first rounds to the
        newest, and NaN or infinite values; for one layer, its values over the rounds; with `client`, that one against
        the others."""
        with self._open() as reader:
            chosen = queries.find_run(reader, run)
            node = None if client is None else _known_client(reader, chosen, client)
            if layer is None:
                result = layer_summary(reader, chosen, node)
            else:
                result = layer_table(reader, chosen, layer, node, lambda rounds: _spread(rounds, POINTS))
        return self._encode({"run": chosen, "client": node} | result)

    def round(
        self,
        run: Run,
        round_index: Annotated[int, Field(ge=0, description="Number of the round.")],
        sort: Annotated[str, Field(max_length=300, description="Metric to sort by, the largest first.")] = "",
        limit: Rows = 20,
    ) -> str:
        """Show one round: a row of metrics for each client, what bound its time, and who failed."""
        with self._open() as reader:
            chosen = queries.find_run(reader, run)
            page = round_page(reader, chosen, round_index, limit=1)
            table = round_table(reader, chosen, round_index, sort=sort, limit=limit)
            failed = failures(reader, chosen, round_index)
        return self._encode({
            "run": chosen, "round": round_index, "time": page.headline, "seconds": page.seconds,
            "columns": [column.name for column in table.columns], "federation": table.whole,
            "clients": [[row.node, *row.values] for row in table.rows], "total": table.total,
            "failures": _failures(failed)[:10],
        })  # fmt: skip

    def findings(
        self,
        run: Run,
        key: Annotated[str | None, Field(max_length=1000, description="Key of one case, for all about it.")] = None,
        limit: Rows = 10,
    ) -> str:
        """List what the detectors found wrong in a run, the worst first: issue, client, since when, how sure; with the
        `key` of a case, its numbers, causes, remedies, and what would refute it."""
        with self._open() as reader:
            chosen = queries.find_run(reader, run)
            if key is not None:
                details = finding_details(reader, chosen, key)
                return self._encode({"run": chosen} | _without(asdict(details), "reference"))
            page = findings_page(reader, chosen, FindingsAsked(limit=limit))
        kept = ("key", "issue", "title", "severity", "node", "layer", "since", "last", "still_there", "confidence",
                "sentence")  # fmt: skip
        cases = [{name: getattr(case, name) for name in kept if hasattr(case, name)} for case in page.cases]
        verdict = {"state": page.verdict.state, "headline": page.verdict.headline, "detail": page.verdict.detail}
        return self._encode({"run": chosen, "verdict": verdict, "examined": page.examined, "cases": cases,
                             "total": page.total, "not_judged_share": page.not_judged})  # fmt: skip

    def profile(self, run: Run) -> str:
        """Say where a run's time, bytes and memory went: what bounds its rounds, which clients hold them up, how much
        was sent, and which remedies would save how many seconds."""
        with self._open() as reader:
            chosen = queries.find_run(reader, run)
            profile = profile_of(reader, chosen)
        verdict, traffic = profile.verdict, profile.traffic
        return self._encode({
            "run": chosen, "clock": profile.clock, "verdict": None if verdict is None else verdict.text,
            "bound_by": None if verdict is None else verdict.kind,
            "shares": None if verdict is None else verdict.shares,
            "round_seconds": None if verdict is None else verdict.seconds,
            "critical_path_seconds": profile.path_parts, "client_seconds": profile.client_parts,
            "stragglers": [
                {"client": s.node, "rounds": s.rounds, "determined": s.determined, "seconds_lost": s.seconds_lost,
                 "part": s.part, "typical_seconds": s.typical, "others_seconds": s.peers}
                for s in profile.stragglers[:8]
            ],
            "remedies": [
                {"what": r.name, "why": r.why, "saves_share": r.share, "costs": r.costs} for r in profile.remedies[:6]
            ],
            "bytes": {"up": traffic.up.bytes, "down": traffic.down.bytes},
            "waited": profile.waiting.in_words(),
        })  # fmt: skip

    def compare(self, runs: Annotated[list[Run], Field(min_length=2, max_length=4)]) -> str:
        """Compare runs with the first one: numbers side by side and whether they differ by more than chance, the round
        at which they diverge, troubles that only some have, and settings that differ."""
        with self._open() as reader:
            comparison = compare(reader, [queries.find_run(reader, run) for run in runs])
        rows = [
            {"name": row.name, "topic": row.topic, "unit": row.unit, "values": row.values,
             "beyond_chance": [None if change is None else change.beyond_chance for change in row.changes]}
            for row in comparison.rows
        ]  # fmt: skip
        return self._encode({
            "sides": comparison.sides, "confidence": comparison.confidence, "rows": rows,
            "diverge": comparison.partings, "troubles": comparison.troubles[:12],
            "settings": [{"name": s.name, "values": s.values} for s in comparison.settings[:12]],
        })  # fmt: skip

    def what_if(
        self,
        run: Run,
        round_index: Annotated[int | None, Field(ge=0, description="A round on the tape.")] = None,
        without: Annotated[list[str], Field(max_length=50, description="Clients to leave out of that round.")] = [],  # noqa: B006
        rule: Literal["recorded", "fedavg", "median", "trimmed_mean", "geometric_median", "norm_clipping", "krum",
                      "multi_krum"] = "recorded",
    ) -> str:  # fmt: skip
        """Compute what would have happened otherwise. Without a round: the time of a round under other settings
        (compression, deadlines, fewer clients), from recorded times. With a round of a run recorded on tape: the step
        of the global model without some clients, or by another aggregation rule."""
        with self._open() as reader:
            chosen = queries.find_run(reader, run)
            if round_index is None:
                return self._encode({"run": chosen, "rows": _times_otherwise(reader, chosen)})
            dropped = tuple(_known_client(reader, chosen, client) for client in without)
            try:
                answer = asdict(
                    what_if(reader, self._store, chosen, round_index, drop=dropped, rule=rule, scored=False)
                )
            except NoTapeError as error:
                raise ConfigError(
                    f"{error} Without `round_index`, this tool computes how long rounds would take."
                ) from error
        answer["layers"] = sorted(answer["layers"], key=lambda row: -(row.get("share") or 0.0))[:12]
        return self._encode(_without(answer, "rules", "score"))

    def query(
        self,
        sql: Annotated[str, Field(max_length=4000, description="One SELECT; `search_docs` knows tables and columns.")],
        limit: Rows = ROWS,
    ) -> str:
        """Run one SELECT on the store, for questions that no other tool answers. Views for people: runs, metrics,
        layer_statistics, events, findings, spans, transfers. Nothing can be changed; a statement may run 10 seconds."""
        with self._open() as reader:
            if reader.database.dialect.name == "postgresql":
                raise StoreError(
                    "SQL that an agent writes is not run on PostgreSQL, whose functions reach beyond the store's "
                    "tables. Use the other tools, or a copy of the store in a file: `fedvitals export`."
                )
            answer = ask(reader, sql, limit, seconds=SECONDS, cell_bytes=CELL)
        return self._encode({"columns": answer.columns, "rows": answer.rows, "more": answer.more})

    def search_docs(
        self,
        words: Annotated[str, Field(max_length=300, description="A few words, for example «update cosine».")],
        limit: Annotated[int, Field(ge=1, le=10)] = 4,
    ) -> str:
        """Search the documentation: what a metric, statistic, issue, table or verb means, and what to do about it."""
        entries = documentation.search(words, limit, self._entries)
        pieces = [
            {"kind": entry.kind, "title": entry.title, "text": _pieces(entry.text)} for entry in entries
        ]  # an answer quotes at most 300 characters at a time
        return self._encode({"entries": pieces})


def _row(deviation: Deviation) -> dict[str, Any]:
    row = asdict(deviation)
    return row if row["not_finite"] else _without(row, "not_finite", "not_finite_since")


def _failures(events: Sequence[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """Return a row for each client and kind of failure: how often, in which rounds first and last; the most first."""
    rounds: dict[tuple[str, str], list[int]] = {}
    for node, event, round_index in events:
        rounds.setdefault((node, event), []).append(round_index)
    rows = [
        {"client": node, "event": event, "times": len(own), "first": min(own), "last": max(own)}
        for (node, event), own in rounds.items()
    ]
    return sorted(rows, key=lambda row: -int(row["times"]))


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _known_client(reader: Reader, run: str, client: str) -> str:
    """Return the node of this name, which may also be written as answers show it: without invisible characters."""
    nodes = reader.history(run).nodes()
    if client in nodes:
        return client
    shown_so = [node for node in nodes if quoted(node) == client]
    if len(shown_so) > 1:
        raise ConfigError(
            f"{len(shown_so)} clients are shown as '{client}'. Their names differ in invisible characters."
        )
    if not shown_so:
        raise ConfigError(unknown("client", client, sorted(nodes, key=natural)[:50]))
    return shown_so[0]


def _spread(rounds: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the rounds, evenly spaced, including the first and the last."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[round(i * (len(rounds) - 1) / (most - 1))] for i in range(most)]


def _series(name: str, of: str, unit: str, rounds: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    chosen = _spread(rounds, POINTS)
    by_round = dict(zip(rounds, values, strict=True))
    odd = sum(not math.isfinite(value) for value in values)
    shown = {"name": name, "of": of, "unit": unit, "rounds": chosen, "values": [by_round[r] for r in chosen]}
    return shown | ({"not_finite": odd} if odd else {})


def _times_otherwise(reader: Reader, run: str) -> list[dict[str, Any]]:
    rows = sorted(profile_of(reader, run).what_if, key=lambda row: -row.saving)
    return [
        {"change": row.name, "round_seconds_before": row.before, "after": row.after, "assumes": row.assumes,
         "costs": row.costs, "clients_cut": row.cut[:5]}
        for row in rows[:12]
    ]  # fmt: skip


def _pieces(text: str) -> list[str]:
    return [text[i : i + TEXT] for i in range(0, min(len(text), 5 * TEXT), TEXT)]
