# SPDX-License-Identifier: Apache-2.0
"""Show the results of proofs, what-ifs, forks and bisections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedvitals.replay.debugger.debugger_output import Cell, DebuggerOutput, format_cell, table_output, text_output
from fedvitals.replay.player.proof import Proof
from fedvitals.replay.shares import Points, is_share, metric_cell
from fedvitals.replay.tape.journal import round_ranges

if TYPE_CHECKING:
    from fedvitals.replay.counterfactual.bisect import BisectResult
    from fedvitals.replay.counterfactual.fork import Fork
    from fedvitals.replay.counterfactual.reaggregate import WhatIfResult

MAIN_METRICS = ("accuracy", "loss")


def show_proof(proof: Proof, node: str | None = None) -> DebuggerOutput:
    """Show a proof. `node`: the client whose updates alone were compared."""
    count = len(proof.proved)
    proved = f"{count} round{'s' * (count != 1)} ({round_ranges(proof.proved)})"
    text = f"  {proved} run again from {proof.begun}, in {proof.seconds:.2f} s"
    if proof.unrecorded:
        text += f"\n  Not proved, as the tape has lost something of them: {round_ranges(proof.unrecorded)}"
    text += "" if proof.remark is None else f"\n  {proof.remark}"
    if not proof.exact:
        text += (
            f"\n  Bits were not compared: {proof.why}. The norms of layers differ by {format_cell(proof.deviation)} at "
            f"most (relative; allowed: {format_cell(proof.tolerance)})."
        )
    if proof.mismatch is not None:
        return text_output("NOT the recorded run", text, str(proof.mismatch))
    what = "proved, to the last bit" if proof.exact else "the same within the tolerance"
    if not proof.proved:
        return text_output("nothing was proved", text)
    whose = "" if node is None else f"updates of {node}, "
    return text_output(f"{whose}round{'s' * (count != 1)} {round_ranges(proof.proved)}: {what}", text)


def show_whatif(result: WhatIfResult) -> DebuggerOutput:
    """Show a what-if as a table of rounds."""
    names = _metrics([turn.recorded for turn in result.turns], [turn.changed for turn in result.turns])
    rows = [(t.round, *_pairs(names, t.recorded, t.changed), t.moved, t.relative) for t in result.turns]
    columns = ("round", *_heads(names, "what if"), "model moved", "possible error")
    parts = [
        f"{result.read} updates read, {result.executed} computed again, {result.seconds:.2f} s.",
        "The error (as a share of how far the model moved) is that of updates trained on other weights.",
        result.note,
    ]
    return table_output(f"what if: {result.change}", columns, rows, " ".join(part for part in parts if part))


def show_fork(result: Fork) -> DebuggerOutput:
    """Show a fork as a table of rounds, with the findings that differ."""
    names = _metrics([*result.recorded.values()], [*result.forked.values()])
    rows = [
        (round_index, *_pairs(names, result.recorded.get(round_index, {}), metrics))
        for round_index, metrics in result.forked.items()
    ]
    parts = [f"The new run is {result.run}, {result.seconds:.1f} s."]
    for what, those in (("gone", result.gone), ("new", result.new)):
        if those:
            parts.append(f"Findings {what}: {', '.join(_finding(finding.issue, finding.node) for finding in those)}.")
    title = f"fork of {result.parent} at round {result.at}: {result.change}"
    return table_output(title, ("round", *_heads(names, "fork")), rows, " ".join(parts))


def show_bisect(result: BisectResult) -> DebuggerOutput:
    """Show the result of a bisection."""
    return text_output("bisect", f"  {result}")


def _finding(issue: str, node: str | None) -> str:
    return issue if node is None else f"{issue} of {node}"


def _metrics(*paths: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the metrics that both have in at least one round; of many, accuracy and loss."""
    known = [{name for metrics in path for name in metrics} for path in paths]
    both = known[0] & known[1]
    return [name for name in MAIN_METRICS if name in both] or sorted(both)


def _heads(names: Sequence[str], other: str) -> list[str]:
    return [head for name in names for head in (name, f"{name}, {other}", "difference")]


def _pairs(names: Sequence[str], before: Mapping[str, float], after: Mapping[str, float]) -> list[Cell]:
    cells: list[Cell] = []
    for name in names:
        a, b = before.get(name), after.get(name)
        difference = None if a is None or b is None else Points(b - a) if is_share(name) else b - a
        cells += [metric_cell(name, a), metric_cell(name, b), difference]
    return cells
