# SPDX-License-Identifier: Apache-2.0
"""What a session shows of itself: the run and its tape, its rounds, a round's clients, and the place where one is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedvitals.diagnosis.cases import cases
from fedvitals.protocols import History
from fedvitals.records import Finding, Run
from fedvitals.replay.debugger import shown
from fedvitals.replay.debugger.shown import Cell, Shown, figure, summary
from fedvitals.replay.tape.journal import Came, spans
from fedvitals.replay.tape.reader import TapeReader
from fedvitals.replay.tape.retention import losses_of

if TYPE_CHECKING:
    from fedvitals.replay.debugger.session import Session

SHOWN_METRICS = ("accuracy", "loss")
TROUBLES = 3  # rounds that cannot be read, each with a sentence


def of_run(run: Run, tape: TapeReader, findings: Sequence[Finding] = ()) -> Shown:
    """What can be replayed, and how: stretches of rounds of the same kind."""
    rows: list[tuple[Cell, ...]] = []
    coverage = tape.coverage()
    for how, stretch in itertools.groupby(coverage, key=lambda one: one.how):
        found = [*stretch]
        numbers = [one.round for one in found]
        rows.append((spans(numbers), how, sum(one.updates for one in found), sum(one.answers for one in found)))
    told = tape.setting.told
    what = [f"host {tape.setting.host}", f"{len(tape.rounds)} rounds", f"tape of {size(tape.bytes)}"]
    what += [f"engine {told['engine']}"] if "engine" in told else []
    columns = ("rounds", "their state", "updates kept", "of")
    notes = [_can(tape), *[covered.trouble for covered in coverage if covered.trouble is not None][:TROUBLES]]
    if run.finished is None:
        notes.append("The run has not ended: where it still trains, `pause` holds it after its round.")
    troubles = cases(findings)
    if troubles and troubles[0].first is not None:
        worst, others = troubles[0], f", and {len(troubles) - 1} more" if len(troubles) > 1 else ""
        notes.append(
            f"Found: {worst.issue} of {worst.place} in round {worst.first}{others}:  goto {worst.first}; findings."
        )
    return shown.table(f"{run.name} ({run.id}): {', '.join(what)}", columns, rows, "\n".join(notes))


def _can(tape: TapeReader) -> str:
    if tape.setting.host == "lab":
        return "Every round with a state before it can be run again to the last bit: --verify proves it."
    return how_again(tape)


def how_again(tape: TapeReader) -> str:
    """Of a run that is not the lab's: what can be run again, and how."""
    name = tape.setting.name or tape.setting.run
    if tape.setting.host == "flower":
        return (
            "Clients of a Flower run train at their own sites. There, what one was sent can be run again: `fedvitals "
            f"replay {name} --round 3 --node NAME --tape DIR --app DIR` (--pdb). Here, aggregations can: --verify."
        )
    return (
        "The training of a plain loop is your own code: with its restore() and train(), --loop module:name (in Python "
        "loop=...), its rounds can be run again and proved."
    )


def of_rounds(tape: TapeReader, findings: Sequence[Finding], here: int) -> Shown:
    told = Counter(finding.where.round for finding in findings)
    rows: list[tuple[Cell, ...]] = []
    for covered in tape.coverage():
        if covered.trouble is not None:
            rows.append(("", covered.round, None, *(None for _ in SHOWN_METRICS), None, covered.how, None))
            continue
        entry = tape.entry(covered.round)
        came = sum(one.mark is not None for one in entry.came)
        numbers = [entry.metrics.get(name) for name in SHOWN_METRICS]
        mark = "→" if covered.round == here else ""
        kept = f"{covered.updates} of {covered.answers}"
        rows.append((mark, covered.round, f"{came} of {len(entry.came)}", *numbers, told[covered.round] or None,
                     covered.how, kept))  # fmt: skip
    columns = ("", "round", "answers", *SHOWN_METRICS, "findings", "state", "updates kept")
    return shown.table(f"rounds on the tape: {spans(tape.rounds)}", columns, rows)


def of_clients(tape: TapeReader, history: History, number: int) -> Shown:
    norms = history.latest("update.norm", number)
    rows: list[tuple[Cell, ...]] = []
    for came in tape.entry(number).came:
        losses = losses_of(came)
        ends = (float(losses[0]), float(losses[-1])) if len(losses) else (None, None)
        kept = "stored" if came.mark is not None and tape.has(came.mark.digest) else "run again"
        rows.append((came.node, came.group, came.weight, len(losses), *ends, norms.get(came.node),
                     _outcome(came) or ("" if came.mark is None else kept)))  # fmt: skip
    columns = ("client", "group", "samples", "steps", "first loss", "last loss", "update.norm", "update")
    return shown.table(f"clients of round {number}", columns, rows)


def _outcome(came: Came) -> str:
    if came.error is not None:
        return came.error
    if came.mark is None:
        return "nothing came"
    return "" if came.used else "left out"


def of_place(session: Session) -> Shown:
    tape, number = session.tape, session.round
    known = spans(tape.rounds)
    if session.node is None:
        entry = tape.entry(number)
        metrics = "".join(f", {name} {figure(value)}" for name, value in entry.metrics.items())
        lost = sum(came.mark is None for came in entry.came)
        failed = f", {lost} of them without an answer" if lost else ""
        found = sum(finding.where.round == number for finding in session.found())
        text = f"  {len(entry.came)} clients{failed}{metrics}" + (
            f", {found} finding{'s' * (found != 1)}" if found else ""
        )
        actions = [str(told.get("kind")) for told in entry.notes.get("actions", ()) if told.get("kind") != "checkpoint"]
        text += f"\n  in force: {', '.join(actions)}" if actions else ""
        return shown.said(f"round {number} of {known}", text, f"Its state: {session.how(number)}")
    found_ = session.material.trace(number, session.node, session.step_number)
    if not found_.steps:
        told = f"  It took no step: {found_.error or 'it has nothing to train on'}"
        return shown.said(f"round {number}, in {session.node}", told)
    step = found_.steps[session.step_number]
    norm = sum(summary(t, bins=1).norm ** 2 for t in (step.gradients or {}).values()) ** 0.5
    title = f"round {number}, in {session.node}, step {step.number} of {len(found_.steps)}"
    text = f"  loss {figure(step.loss)}, gradient norm {figure(float(norm))}, batch of {len(step.rows)}"
    if found_.error is not None and step.number == len(found_.steps) - 1:
        text += f"\n  Here it failed: {found_.error}"
    return shown.said(title, text, session.exactness(session.node))


def size(count: int) -> str:
    """Bytes as people read them."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):  # noqa: B007 - the last one is used
        if value < 1000:
            break
        value /= 1000
    return f"{value:.3g} {unit}"
