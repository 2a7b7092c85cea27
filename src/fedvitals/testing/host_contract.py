# SPDX-License-Identifier: Apache-2.0
"""The contract of hosts: the store records what each client did in which round, as the server saw it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedvitals.records import FAILURES, Event, Finding, Metric, Record, Run, Span
from fedvitals.store import open_reader
from fedvitals.store.read.queries import get_run, list_runs, records
from fedvitals.testing.scripted_federation import FORGED_NAME, FORGED_VALUE, FORKED_WORDS, ScriptedFederation, Trouble
from fedvitals.transport.sink_writer import SENDER

# The events that may report a trouble; which one depends on what a framework's server can know.
REPORTS: Mapping[Trouble, tuple[str, ...]] = {
    "fails": ("client.failed",),
    "late": ("update.late",),
    "lost": ("update.late", "update.lost", "client.dropped_out", "worker.lost"),
}
STALE = ("update.staleness", "update.base_age")  # metrics that indicate an update of an older model
UPDATE = "update.norm"  # the metric that every measured update has
ROUND = "time.round"  # the metric that every round has once
PASSED = "passed"


class HostDriver(Protocol):
    """What `check_host` needs of a host: write a class with these two attributes and two methods.

    `name`: the name of the host, as the store has it. `cannot`: the checks that make no sense for the host, each with
    the reason, which the result of `check_host` repeats.
    """

    name: str
    cannot: Mapping[str, str]

    def client_names(self, count: int) -> Sequence[str]:
        """Return the names by which the host's server will know the clients.

        Args:
            count: The number of clients.
        """
        ...

    def run(self, federation: ScriptedFederation, store: Path) -> None:
        """Run a federation to its end, monitored.

        The server calls `federation.in_round` once inside each round and `federation.at_end` after the last one.

        Args:
            federation: What happens in which round.
            store: The file in which the records are stored.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredFederation:
    """What a store contains of one federation: the run's records in the rounds that this federation added to it."""

    script: ScriptedFederation
    run: Run
    rounds: tuple[int, ...]  # in the host's numbering
    metrics: tuple[Metric, ...]
    events: tuple[Event, ...]
    spans: tuple[Span, ...]
    findings: tuple[Finding, ...]

    def round_index(self, record: Metric | Event | Finding) -> int | None:
        """Return the round of a record in the script's numbering; None if it is in none of these rounds."""
        return self.rounds.index(record.where.round) if record.where.round in self.rounds else None

    @property
    def ends(self) -> list[Metric]:
        """Return the store's records of the rounds' ends, one for each."""
        return [metric for metric in self.metrics if metric.name == ROUND and metric.where.node is None]

    def measured(self, name: str) -> Counter[tuple[int | None, str | None]]:
        """Return how often a metric of a whole client was stored, by round and client."""
        own = (metric for metric in self.metrics if metric.name == name and metric.where.layer is None)
        return Counter((self.round_index(m), m.where.node) for m in own if m.where.node in self.script.clients)


def check_host(driver: HostDriver) -> dict[str, str]:
    """Let a host run three small federations that write to one store, and check what the store then holds.

    Args:
        driver: Starts the host's federations.

    Returns:
        For each check «passed», or why it was left out.

    Raises:
        AssertionError: Checks have failed; the message lists every problem.
    """
    for name in driver.cannot:
        if name not in CHECKS or name == "identity":
            raise AssertionError(f"{driver.name}: no check that a host can leave out is called '{name}'.")
    outcome: dict[str, str] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fedvitals-host-") as folder:
        stored = _run_all(driver, Path(folder))
        for name, (federation, check) in CHECKS.items():
            if name in driver.cannot:
                outcome[name] = f"left out: {driver.cannot[name]}"
                continue
            faults = [*check(driver, stored, federation)]
            wrong += [f"{driver.name}: {name}: {fault}" for fault in faults]
            outcome[name] = PASSED
    if wrong:
        raise AssertionError("\n".join(wrong))
    return outcome


def _run_all(driver: HostDriver, folder: Path) -> dict[str, StoredFederation]:
    store = folder / "runs.db"
    stored: dict[str, StoredFederation] = {}
    before: dict[str, set[int]] = {}
    for script in _scripts(driver, str(folder)):
        try:
            driver.run(script, store)
        except Exception as error:
            raise AssertionError(f"{driver.name}: the federation '{script.name}' did not end: {error!r}") from error
        stored[script.name] = _read(script, store, before)
        run = stored[script.name].run.id
        before[run] = before.get(run, set()) | {*stored[script.name].rounds}
    return stored


def _scripts(driver: HostDriver, folder: str) -> Iterator[ScriptedFederation]:
    four, three, two = (tuple(driver.client_names(count)) for count in (4, 3, 2))
    troubles: tuple[tuple[int, str, Trouble], ...] = ((1, four[1], "fails"), (1, four[2], "late"), (2, four[1], "lost"))
    liar = None if "hostile telemetry" in driver.cannot else four[3]
    yield ScriptedFederation("troubled", four, 3, folder, troubles, liar)
    yield ScriptedFederation("again", two, 2, folder, forks_in=None if "fork" in driver.cannot else 0)
    if "rounds without a barrier" not in driver.cannot:
        yield ScriptedFederation("asynchronous", three, 4, folder, slow=three[2])


def _read(script: ScriptedFederation, store: Path, before: Mapping[str, set[int]]) -> StoredFederation:
    """Read what a federation has added to the store: a run, or rounds of an existing one."""
    with open_reader(store) as reader:
        runs = [run.id for run in list_runs(reader)]
        rounds = {run: [m.where.round for m in records(reader, run, Metric) if m.name == ROUND] for run in runs}
        new = {run: {*rounds[run]} - before.get(run, set()) for run in runs}
        chosen = next((run for run in runs if new[run]), None) or next(iter(runs), None)
        if chosen is None:
            raise AssertionError(f"The store has no run after the federation '{script.name}'.")

        def read(kind: type[Any]) -> tuple[Any, ...]:
            old = before.get(chosen, set())
            return tuple(record for record in records(reader, chosen, kind) if record.where.round not in old)

        numbers = tuple(sorted(number for number in new[chosen] if number is not None))
        kinds = (read(Metric), read(Event), read(Span), read(Finding))
        return StoredFederation(script, get_run(reader, chosen), numbers, *kinds)


# -- checks: each yields the violations that it finds -------------------------------------------------------------


def _identity(driver: HostDriver, stored: Mapping[str, StoredFederation], name: str) -> Iterator[str]:
    own = stored[name]
    script = own.script
    if own.run.host != driver.name:
        yield f"the run's host is called '{own.run.host}'."
    if len(own.rounds) != script.rounds:
        yield f"{script.rounds} rounds were run, and the store has {[*own.rounds]}."
        return
    every: tuple[Record, ...] = (*own.metrics, *own.events, *own.spans, *own.findings)
    strangers = {_node(record) for record in every} - {*script.clients, "server", None}
    if strangers:
        yield f"records tell of {sorted(map(str, strangers))}; the server's clients are {[*script.clients]}."
    updates = own.measured(UPDATE)
    for round_index in range(script.rounds):
        for node in script.clients:
            trouble, count = script.trouble(round_index, node), updates[round_index, node]
            if count != (trouble is None) and not (trouble == "fails" and count == 1):  # how far it had come
                yield f"round {round_index} has {count} updates of {node}, which {_words(trouble)}."


def _late_and_lost(driver: HostDriver, stored: Mapping[str, StoredFederation], name: str) -> Iterator[str]:
    del driver
    own = stored[name]
    reports: dict[tuple[int | None, str | None], set[str]] = {}
    for event in own.events:
        if event.name in FAILURES:
            reports.setdefault((own.round_index(event), event.where.node), set()).add(event.name)
    for round_index, node, trouble in own.script.troubles:
        names = reports.pop((round_index, node), set())
        if not names & {*REPORTS[trouble]}:
            wanted = " or ".join(REPORTS[trouble])
            yield f"{node} {_words(trouble)} in round {round_index}; {wanted} is to say so, and {[*names]} is there."
    for (round_number, who), names in reports.items():
        yield f"{sorted(names)} of {who} in round {round_number}, and nothing was wrong with it."


def _restart(driver: HostDriver, stored: Mapping[str, StoredFederation], name: str) -> Iterator[str]:
    del driver
    first, second = stored["troubled"], stored[name]
    if len(second.rounds) != second.script.rounds:
        yield f"{second.script.rounds} rounds were run again, and the store has {[*second.rounds]} of them."
    for own in (first, second):
        counts = Counter(end.where.round for end in own.ends)
        twice = sorted(str(number) for number, count in counts.items() if count > 1)
        if twice:
            yield f"rounds {', '.join(twice)} of run {own.run.id} were recorded twice: two runs are mixed."
    strangers = {metric.where.node for metric in second.metrics} - {*second.script.clients, "server", None}
    if strangers:
        yield f"the second run reports on {sorted(map(str, strangers))}, which took part in the first one only."


def _hostile(driver: HostDriver, stored: Mapping[str, StoredFederation], name: str) -> Iterator[str]:
    del driver
    own = stored[name]
    script = own.script
    refused = {event.where.node for event in own.events if event.name == "telemetry.refused"}
    if refused != {script.liar}:
        yield f"telemetry of {sorted(map(str, refused))} was refused, and {script.liar} is the one that lies."
    lies: list[Metric | Event] = [m for m in own.metrics if m.value == FORGED_VALUE or m.name == FORGED_NAME]
    lies += [e for e in own.events if FORGED_NAME in e.message and e.name != "telemetry.refused"]
    for lie in lies:
        yield f"the store has '{lie.name}' of {lie.where.node}, which {script.liar} made up."
    every: tuple[Record, ...] = (*own.metrics, *own.events, *own.spans)
    for record in every:
        if record.source.startswith(SENDER) and record.source.removeprefix(SENDER).split("/")[0] != _node(record):
            yield f"a record of {_node(record)} was sent by {record.source.removeprefix(SENDER)}."
            break
    guilty = {script.liar, *(node for _, node, _ in script.troubles), None}
    for finding in own.findings:
        named = {finding.where.node, *(suspect.node for suspect in finding.suspects)} - guilty
        if finding.severity != "note" and named:
            yield f"{finding.issue} names {sorted(map(str, named))}, and nothing is wrong with it."
    errors = [e.message for e in own.events if e.name == "monitor.error" and not e.source.startswith(SENDER)]
    yield from (f"the monitor failed: {error}" for error in errors[:1])


def _without_barrier(driver: HostDriver, stored: Mapping[str, StoredFederation], name: str) -> Iterator[str]:
    del driver
    own = stored[name]
    script = own.script
    if len(own.rounds) != script.rounds:
        yield f"{script.rounds} rounds were run, and the store has {[*own.rounds]}."
        return
    taken = [note["round"] for note in script.notes("took") if note["node"] == script.slow]
    if not any(round_index > 0 for round_index in taken):
        yield f"the answer of {script.slow}, asked in round 0, was never taken in a later round: it took {taken}."
        return
    updates = own.measured(UPDATE)
    ages = {(own.round_index(m), m.where.node) for m in own.metrics if m.name in STALE and m.value > 0}
    for round_index in taken:
        fresh, marked = updates[round_index, script.slow], (round_index, script.slow) in ages
        if round_index > 0 and not marked and (fresh or not updates[0, script.slow]):
            yield (
                f"the update of {script.slow}, asked in round 0 and taken in round {round_index}, stands there like a "
                f"new one: file it under round 0, or log {' or '.join(STALE)} with it."
            )
    twice = [place for place, count in updates.items() if count > 1]
    if twice:
        yield f"updates were recorded twice: {twice}."


def _close_twice(driver: HostDriver, stored: Mapping[str, StoredFederation], name: str) -> Iterator[str]:
    del driver
    own = stored[name]
    closed = own.script.notes("closed")
    if not closed:
        yield "the host did not call federation.at_end(close) after the last round."
    yield from (f"closing twice raised {note['error']}." for note in closed if note["error"])
    if own.run.finished is None:
        yield "the run is not marked as finished."


def _fork(driver: HostDriver, stored: Mapping[str, StoredFederation], name: str) -> Iterator[str]:
    del driver
    own = stored[name]
    forked = own.script.notes("forked")
    if not forked:
        yield "the host did not call federation.in_round(round, close) inside of each round."
    yield from ("the forked process did not end." for note in forked if note["outcome"] != "ended")
    if any(FORKED_WORDS in event.message for event in own.events):
        yield "what the forked process logged is in the store: it wrote into its parent's run."
    counts = Counter(end.where.round for end in own.ends)
    if [*counts.values()] != [1] * own.script.rounds:
        yield f"after the fork the rounds {dict(counts)} are in the store, by number of records."
    if own.run.finished is not None and own.run.finished < max((end.at for end in own.ends), default=0.0):
        yield "the forked process ended its parent's run."


Check = Callable[[HostDriver, Mapping[str, StoredFederation], str], Iterator[str]]
CHECKS: Mapping[str, tuple[str, Check]] = {
    "identity": ("troubled", _identity),
    "late and lost replies": ("troubled", _late_and_lost),
    "hostile telemetry": ("troubled", _hostile),
    "restart": ("again", _restart),
    "fork": ("again", _fork),
    "close twice": ("again", _close_twice),
    "rounds without a barrier": ("asynchronous", _without_barrier),
}
"""By name: the federation that a check looks at, and the check."""


def _words(trouble: Trouble | None) -> str:
    return {"fails": "failed", "late": "answered late", "lost": "did not answer", None: "answered once"}[trouble]


def _node(record: Any) -> str | None:
    node: str | None = record.where.node
    return node
