# SPDX-License-Identifier: Apache-2.0
"""Computes the pages of a run's tape: its content over all rounds, and the state of the federation at one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from fedvitals.catalog import CATALOG
from fedvitals.dashboard.pages.round_clients import CameRow, ClientDiff, client_diff, cohort_of, norms_of
from fedvitals.dashboard.pages.shell_commands import Command, Here, commands_of
from fedvitals.dashboard.pages.tape_index import DAMAGED, NoTapeError, Opened, RoundCoverage, opened
from fedvitals.dashboard.pages.what_if import Updates, flat, updates_of
from fedvitals.diagnosis.cases import Case, is_trouble
from fedvitals.errors import FedvitalsError
from fedvitals.store import Target
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.case_sentences import clause
from fedvitals.views.cases import case_key, cases_of, culprits, text_of
from fedvitals.views.labels import labels_of
from fedvitals.views.metric_titles import metric_title

if TYPE_CHECKING:
    from fedvitals.replay.tape.journal import RoundEntry

HOW = (
    "Without a tape a run can be looked at, but not run again. Runs of `fedvitals lab` have one unless they were "
    "started with --no-tape; in your own training, hand one to the monitor. It takes a few models' room on disk, and "
    "hardly any time of the training."
)
CODE = 'monitor = fv.Monitor("runs.db", tape=fv.Tape(budget="1 GB"))'
RANK = {"critical": 0, "warning": 1, "note": 2}
FINDINGS, ACTIONS, STATES, LAYERS, METRICS = 20, 50, 50, 2000, 100  # the most that a page shows
STEP = 64 << 20  # size on disk of two models up to which a page reads them to compare


@dataclass(frozen=True, slots=True)
class Flag:
    """The worst finding of a round, and the number of findings."""

    round: int
    severity: str
    count: int
    words: str


@dataclass(frozen=True, slots=True)
class ReplayIndex:
    """The scrubber: a column for each round. `kinds`: «whole», «again» (run from `since` on), «digests», «damaged»."""

    run: str
    there: bool
    why: str  # why there is no tape
    how: str
    code: str
    host: str
    bytes: int | None
    budget: int | None
    machine: str
    rounds: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    since: tuple[int | None, ...] = ()
    answers: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()  # that are completely on the tape
    flags: tuple[Flag, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerState:
    """A layer of the model before and after a round."""

    name: str
    before: float | None  # norm; None: not finite
    after: float | None
    same: bool | None  # whether not a single bit has changed
    step: float | None  # norm of the change, if both models are on the tape


@dataclass(frozen=True, slots=True)
class StateRow:
    """Other state that the server kept."""

    name: str
    digest: str
    whole: bool


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A metric before and after a round."""

    name: str
    title: str  # the name for users
    unit: str
    before: float | None
    after: float | None


@dataclass(frozen=True, slots=True)
class ActionInForce:
    """A correction that was in force in a round."""

    kind: str
    target: str | None
    why: str
    arguments: str


@dataclass(frozen=True, slots=True)
class FoundHere:
    """A case that was found in this round."""

    key: str
    severity: str
    words: str
    node: str | None
    suspects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplayRound:
    """`trouble`: why this round cannot be read; all else is empty then."""

    run: str
    round: int
    kind: str
    since: int | None
    how: str
    trouble: str | None
    commands: tuple[Command, ...]
    findings: tuple[FoundHere, ...]
    digest: str | None = None
    digest_after: str | None = None
    clock: float | None = None
    clock_after: float | None = None
    metrics: tuple[MetricRow, ...] = ()
    layers: tuple[LayerState, ...] = ()
    stepped: bool = False  # whether the change could be measured
    states: tuple[StateRow, ...] = ()
    cohort: tuple[CameRow, ...] = ()
    total: int = 0
    offset: int = 0
    used: int = 0
    left_out: int = 0
    failed: int = 0
    lost: int = 0
    whole: int = 0
    norms: str = ""
    norm_layers: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()  # names of all clients that answered, for the selection
    suspects: tuple[str, ...] = ()  # of these, the suspects in troubles of this round whose update was used
    actions: tuple[ActionInForce, ...] = ()
    client: ClientDiff | None = None


class Before(msgspec.Struct, frozen=True):
    """What was measured at the end of the previous round."""

    metrics: dict[str, float | None] = {}


def replay_index(reader: Reader, store: Target, run: str) -> ReplayIndex:
    """Return which rounds are on the tape and how; without a tape, how to get one."""
    try:
        index = opened(reader, store, run)
    except NoTapeError as error:
        how = "" if error.extra or error.damaged else HOW
        return ReplayIndex(run, False, str(error), how, CODE if how else "", _host(reader, run), None, None, "")
    rows, setting = index.rows, index.tape.setting
    budget = setting.kept.get("budget")
    return ReplayIndex(
        run, True, "", "", "", setting.host, index.tape.bytes, budget if isinstance(budget, int) else None,
        ", ".join(f"{name} {value}" for name, value in setting.machine.items()),
        tuple(row.round for row in rows),
        tuple(coverage.kind for coverage in index.coverages),
        tuple(coverage.since for coverage in index.coverages),
        tuple(row.answers for row in rows),
        tuple(row.failed for row in rows),
        tuple(row.left_out for row in rows),
        tuple(coverage.updates for coverage in index.coverages),
        _flags(reader, run),
    )  # fmt: skip


def _host(reader: Reader, run: str) -> str:
    try:
        return queries.get_run(reader, run).host
    except FedvitalsError:
        return ""


def _flags(reader: Reader, run: str) -> tuple[Flag, ...]:
    seen: dict[int, list[Case]] = {}
    for case in cases_of(reader, run):  # worst first
        for number in case.rounds:
            seen.setdefault(number, []).append(case)
    labels = labels_of(reader, run)
    worst = {number: min(same, key=lambda case: RANK.get(case.severity, 3)) for number, same in seen.items()}
    return tuple(
        Flag(number, worst[number].severity, len(seen[number]), clause([worst[number]], labels))
        for number in sorted(seen)
    )


def replay_round(
    reader: Reader,
    store: Target,
    run: str,
    number: int,
    node: str | None = None,
    *,
    sort: str = "trouble",
    limit: int = 50,
    offset: int = 0,
) -> ReplayRound:
    """Return the state at one round, its answers, and one client compared with the others; ConfigError: not on the
    tape.
    """
    index = opened(reader, store, run)
    place = index.place(number)
    coverage, trouble, entry = index.coverages[place], index.rows[place].trouble, None
    try:
        entry = index.tape.entry(number) if trouble is None else None
    except (FedvitalsError, OSError) as error:
        coverage, trouble = RoundCoverage(DAMAGED, None, 0), str(error)
    answered = entry is not None and node is not None and entry.reply_of(node) is not None
    here = Here(run, store, index.tape.setting.host, number, node, answered)
    about = _about(reader, here, coverage, trouble)
    if entry is None:
        return ReplayRound(**about)
    return ReplayRound(
        **about,
        **_state(index, entry, index.rows[place - 1].round if place else None),
        **_cohort(reader, run, index, entry, node, (sort, limit, offset)),
        actions=_actions(entry.notes.get("actions")),
    )


def _about(reader: Reader, here: Here, coverage: RoundCoverage, trouble: str | None) -> dict[str, Any]:
    cases, labels = cases_of(reader, here.run), labels_of(reader, here.run)
    findings = [
        FoundHere(
            case_key(case),
            case.severity,
            clause([case], labels),
            case.node,
            tuple(suspect.node for suspect in case.newest.suspects[:5]),
        )
        for case in cases
        if here.round in case.rounds
    ]
    return {
        "run": here.run,
        "round": here.round,
        "kind": coverage.kind,
        "since": coverage.since,
        "how": _how(coverage, trouble),
        "trouble": trouble,
        "commands": commands_of(here, coverage, cases),
        "findings": tuple(findings[:FINDINGS]),
    }


def _suspects(reader: Reader, run: str, entry: RoundEntry) -> tuple[str, ...]:
    """Return the clients whose updates should be left out: they harmed the learning, and their update was used."""
    used = {came.node for came in entry.came if came.used and came.mark is not None}
    cases = [case for case in cases_of(reader, run) if entry.round in case.rounds and is_trouble(case)]
    learning = [case for case in cases if case.issue_entry.family != "system"]
    named = dict.fromkeys(name for case in learning for name in culprits(case) if name in used)
    return tuple(named) if len(named) < len(used) else ()


def _how(coverage: RoundCoverage, trouble: str | None) -> str:
    if trouble is not None:
        return "This round cannot be read."
    return {
        "whole": "The state before this round is on the tape, whole: whatever follows is computed from here.",
        "again": "Its state is not stored: it is computed again from "
        + (f"round {coverage.since}." if coverage.since else "the very beginning."),
        "digests": "Only digests and norms are left: no whole state before it is on the tape any more.",
    }[coverage.kind]


def _state(index: Opened, entry: RoundEntry, before: int | None) -> dict[str, Any]:
    tape, model, after = index.tape, entry.state.get("model"), entry.after.get("model")
    names = tape.setting.layers[:LAYERS]
    steps = _steps(index, entry)
    norms = [dict(zip(names, () if mark is None else mark.norms, strict=False)) for mark in (model, after)]
    digests = [() if mark is None else mark.layers for mark in (model, after)]
    same = {name: first == second for name, first, second in zip(names, *digests, strict=False)}
    layers = [
        LayerState(name, norms[0].get(name), norms[1].get(name), same.get(name), steps.get(name)) for name in names
    ]
    others = [(name, mark) for name, mark in entry.state.items() if name != "model"][:STATES]
    return {
        "digest": None if model is None else model.digest,
        "digest_after": None if after is None else after.digest,
        "clock": _clock(entry.notes),
        "clock_after": _clock(entry.after_notes),
        "metrics": _metrics(index, entry, before),
        "layers": tuple(layers),
        "stepped": bool(steps),
        "states": tuple(StateRow(name, mark.digest, tape.has(mark.digest)) for name, mark in others),
    }


def _steps(index: Opened, entry: RoundEntry) -> dict[str, float]:
    """Return the size of each layer's step, if both models are on the tape, and not too large for a page."""
    tape, marks = index.tape, (entry.state.get("model"), entry.after.get("model"))
    if any(mark is None or not tape.has(mark.digest) for mark in marks):
        return {}
    digests = [mark.digest for mark in marks if mark is not None]
    if sum(tape.size(digest) for digest in digests) > STEP:
        return {}
    try:
        before, after = (tape.tensors(digest) for digest in digests)
        return {name: float((flat([after[name]]) - flat([before[name]])).double().norm()) for name in before}
    except (FedvitalsError, KeyError, RuntimeError):  # damaged: the digests are shown anyway
        return {}


def _clock(notes: Mapping[str, Any]) -> float | None:
    try:
        return float.fromhex(notes["clock"]) or None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _metrics(index: Opened, entry: RoundEntry, before: int | None) -> tuple[MetricRow, ...]:
    earlier: Mapping[str, float | None] = {}
    if before is not None:
        try:
            earlier = index.tape.journal.read_as(Before, before).metrics
        except (FedvitalsError, OSError):
            earlier = {}
    return tuple(
        MetricRow(name, metric_title(name), CATALOG[name].unit if name in CATALOG else "", earlier.get(name), value)
        for name, value in [*entry.metrics.items()][:METRICS]
    )


def _cohort(
    reader: Reader, run: str, index: Opened, entry: RoundEntry, node: str | None, asked: tuple[str, int, int]
) -> dict[str, Any]:
    sort, limit, offset = asked
    updates: Updates | str = "" if node is None else _updates(reader, run, index, entry)
    norms = norms_of(reader, run, entry, index.tape.setting.layers, None if isinstance(updates, str) else updates)
    suspects = _suspects(reader, run, entry)
    rows = cohort_of(entry, norms, index.tape.has, sort, suspects)
    states = [row.state for row in rows]
    return {
        "cohort": tuple(rows[offset : offset + limit]),
        "suspects": suspects,
        "total": len(rows),
        "offset": offset,
        "used": states.count("used"),
        "left_out": states.count("left out"),
        "failed": states.count("failed"),
        "lost": entry.lost,
        "whole": sum(row.whole for row in rows),
        "norms": norms.of,
        "norm_layers": norms.layers,
        "nodes": tuple(row.node for row in rows),
        "client": None if node is None else client_diff(entry, node, norms, rows, updates),
    }


def _updates(reader: Reader, run: str, index: Opened, entry: RoundEntry) -> Updates | str:
    try:
        return updates_of(reader, run, index, entry)
    except FedvitalsError as error:
        return str(error)


def _actions(recorded: Any) -> tuple[ActionInForce, ...]:
    actions = []
    for action in recorded[:ACTIONS] if isinstance(recorded, list | tuple) else ():
        if isinstance(action, Mapping):
            target = action.get("target")
            actions.append(
                ActionInForce(
                    str(action.get("kind", ""))[:200],
                    None if target is None else str(target)[:500],
                    str(action.get("finding", ""))[:500],
                    text_of(action.get("arguments") or {})[:500],
                )
            )
    return tuple(actions)
