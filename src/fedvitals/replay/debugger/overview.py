# SPDX-License-Identifier: Apache-2.0
"""Show the session itself: the run and its tape, its rounds, a round's clients, and the current place."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedvitals.diagnosis.cases import cases
from fedvitals.diagnosis.memory_fit import size_words
from fedvitals.protocols import History
from fedvitals.records import Finding, Run
from fedvitals.replay.debugger.debugger_output import (
    Cell,
    DebuggerOutput,
    format_cell,
    summarize,
    table_output,
    text_output,
)
from fedvitals.replay.shares import metric_cell, metric_in_words
from fedvitals.replay.tape.journal import ClientReply, round_ranges
from fedvitals.replay.tape.reader import TapeReader
from fedvitals.replay.tape.retention import losses_of

if TYPE_CHECKING:
    from fedvitals.replay.debugger.session import Session

SHOWN_METRICS = ("accuracy", "loss")
TROUBLES = 3  # rounds that cannot be read, each with a sentence


def show_run(run: Run, tape: TapeReader, findings: Sequence[Finding] = ()) -> DebuggerOutput:
    """Show which rounds can be replayed, and how: ranges of rounds of the same kind."""
    rows: list[tuple[Cell, ...]] = []
    coverage = tape.coverage()
    for how, stretch in itertools.groupby(coverage, key=lambda round_coverage: round_coverage.how):
        numbers, updates, answers = zip(*((each.round, each.updates, each.answers) for each in stretch), strict=True)
        rows.append((round_ranges([*numbers]), how, sum(updates), sum(answers)))
    settings = tape.setting.description
    what = [f"host {tape.setting.host}", f"{len(tape.rounds)} rounds", f"tape of {size_words(tape.bytes)}"]
    what += [f"engine {settings['engine']}"] if "engine" in settings else []
    columns = ("rounds", "their state", "updates kept", "of")
    notes = ["Every round with a state before it can be run again to the last bit: --verify checks that."]
    if tape.setting.host != "lab":
        notes = [replay_instructions(tape)]
    notes += [covered.trouble for covered in coverage if covered.trouble is not None][:TROUBLES]
    if run.finished is None:
        notes.append("The run has not ended: where it still trains, `pause` holds it after its round.")
    troubles = cases(findings)
    if troubles and troubles[0].first is not None:
        worst, others = troubles[0], f", and {len(troubles) - 1} more" if len(troubles) > 1 else ""
        notes.append(
            f"Found: {worst.issue} of {worst.place} in round {worst.first}{others}:  goto {worst.first}; findings."
        )
    return table_output(f"{run.name} ({run.id}): {', '.join(what)}", columns, rows, "\n".join(notes))


def replay_instructions(tape: TapeReader) -> str:
    """Return what can be run again of a run that is not the lab's, and how."""
    name = tape.setting.name or tape.setting.run
    if tape.setting.host == "flower":
        return (
            "Clients of a Flower run train at their own sites. There, what one was sent can be run again: `fedvitals "
            f"replay {name} --round 3 --node NAME --tape DIR --app DIR` (--pdb). Here, aggregations can: --verify."
        )
    return (
        "The training of a plain loop is your own code: with its restore() and train(), --loop module:name (in Python "
        "loop=...), its rounds can be run again and verified."
    )


def show_rounds(tape: TapeReader, findings: Sequence[Finding], here: int) -> DebuggerOutput:
    """Show the rounds on the tape, with `here` marked."""
    findings_by_round = Counter(finding.where.round for finding in findings)
    rows: list[tuple[Cell, ...]] = []
    for covered in tape.coverage():
        if covered.trouble is not None:
            rows.append(("", covered.round, None, *(None for _ in SHOWN_METRICS), None, covered.how, None))
            continue
        entry = tape.entry(covered.round)
        numbers = [metric_cell(name, entry.metrics.get(name)) for name in SHOWN_METRICS]
        mark = "→" if covered.round == here else ""
        came = f"{sum(reply.mark is not None for reply in entry.came)} of {len(entry.came)}"
        findings_here = findings_by_round[covered.round] or None
        kept = f"{covered.updates} of {covered.answers}"
        rows.append((mark, covered.round, came, *numbers, findings_here, covered.how, kept))
    columns = ("", "round", "answers", *SHOWN_METRICS, "findings", "state", "updates kept")
    return table_output(f"rounds on the tape: {round_ranges(tape.rounds)}", columns, rows)


def show_clients(tape: TapeReader, history: History, round_index: int) -> DebuggerOutput:
    """Show the clients of a round."""
    norms = history.latest("update.norm", round_index)
    rows: list[tuple[Cell, ...]] = []
    for came in tape.entry(round_index).came:
        losses = losses_of(came)
        ends = (float(losses[0]), float(losses[-1])) if len(losses) else (None, None)
        kept = "stored" if came.mark is not None and tape.has(came.mark.digest) else "run again"
        rows.append((came.node, came.group, came.weight, len(losses), *ends, norms.get(came.node),
                     _outcome(came) or ("" if came.mark is None else kept)))  # fmt: skip
    columns = ("client", "group", "samples", "steps", "first loss", "last loss", "update.norm", "update")
    return table_output(f"clients of round {round_index}", columns, rows)


def _outcome(came: ClientReply) -> str:
    if came.error is not None:
        return came.error
    if came.mark is None:
        return "nothing came"
    return "" if came.used else "left out"


def show_place(session: Session) -> DebuggerOutput:
    """Show the current round, or the current step of a client."""
    tape, round_index = session.tape, session.round
    known = round_ranges(tape.rounds)
    if session.node is None:
        entry = tape.entry(round_index)
        told = [name for name in SHOWN_METRICS if name in entry.metrics] or [*entry.metrics]
        metrics = "".join(f", {name} {metric_in_words(name, entry.metrics[name])}" for name in told)
        lost = sum(came.mark is None for came in entry.came)
        failed = f", {lost} of them without an answer" if lost else ""
        count = sum(finding.where.round == round_index for finding in session.findings_until())
        findings = f", {count} finding{'s' * (count != 1)}" if count else ""
        kinds = [str(action.get("kind")) for action in entry.actions]
        actions = ", ".join(kind for kind in kinds if kind != "checkpoint")
        text = f"  {len(entry.came)} clients{failed}{metrics}{findings}"
        text += f"\n  in force: {actions}" if actions else ""
        return text_output(f"round {round_index} of {known}", text, f"Its state: {session.how(round_index)}")
    trace = session.states.trace(round_index, session.node, session.step_number)
    if not trace.steps:
        action = f"  It took no step: {trace.error or 'it has nothing to train on'}"
        return text_output(f"round {round_index}, in {session.node}", action)
    step = trace.steps[session.step_number]
    norm = sum(summarize(t, bins=1).norm ** 2 for t in (step.gradients or {}).values()) ** 0.5
    title = f"round {round_index}, in {session.node}, step {step.number} of {len(trace.steps)}"
    text = f"  loss {format_cell(step.loss)}, gradient norm {format_cell(float(norm))}, batch of {len(step.rows)}"
    if trace.error is not None and step.number == len(trace.steps) - 1:
        text += f"\n  Here it failed: {trace.error}"
    return text_output(title, text, session.exactness(session.node))
