# SPDX-License-Identifier: Apache-2.0
"""What proofs, what-ifs, forks and bisections found, as something to be shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedvitals.replay.debugger import shown
from fedvitals.replay.debugger.shown import Cell, Shown, figure
from fedvitals.replay.player.proof import Proof
from fedvitals.replay.tape.journal import spans

if TYPE_CHECKING:
    from fedvitals.replay.counterfactual.bisect import Culprit
    from fedvitals.replay.counterfactual.fork import Fork
    from fedvitals.replay.counterfactual.reaggregate import WhatIf

USUAL = ("accuracy", "loss")


def of_proof(proof: Proof, node: str | None = None) -> Shown:
    """`node`: whose updates alone were looked at."""
    count = len(proof.proved)
    proved = f"{count} round{'s' * (count != 1)} ({spans(proof.proved)})"
    told = f"  {proved} run again from {proof.begun}, in {proof.seconds:.2f} s"
    if proof.unrecorded:
        told += f"\n  Not proved, as the tape has lost something of them: {spans(proof.unrecorded)}"
    told += "" if proof.remark is None else f"\n  {proof.remark}"
    if not proof.exact:
        told += (
            f"\n  Bits were not compared: {proof.why}. The norms of layers differ by {figure(proof.deviation)} at most "
            f"(relative; allowed: {figure(proof.tolerance)})."
        )
    if proof.mismatch is not None:
        return shown.said("NOT the recorded run", told, str(proof.mismatch))
    what = "proved, to the last bit" if proof.exact else "the same within the tolerance"
    if not proof.proved:
        return shown.said("nothing was proved", told)
    whose = "" if node is None else f"updates of {node}, "
    return shown.said(f"{whose}round{'s' * (count != 1)} {spans(proof.proved)}: {what}", told)


def of_whatif(found: WhatIf) -> Shown:
    names = _metrics([turn.recorded for turn in found.turns], [turn.changed for turn in found.turns])
    rows = [(t.round, *_pairs(names, t.recorded, t.changed), t.moved, t.relative) for t in found.turns]
    columns = ("round", *_heads(names, "what if"), "model moved", "possible error")
    parts = [
        f"{found.read} updates read, {found.executed} computed again, {found.seconds:.2f} s.",
        "The error (as a share of how far the model moved) is that of updates trained on other weights.",
        found.note,
    ]
    return shown.table(f"what if: {found.change}", columns, rows, " ".join(part for part in parts if part))


def of_fork(found: Fork) -> Shown:
    names = _metrics([*found.recorded.values()], [*found.forked.values()])
    rows = [(number, *_pairs(names, found.recorded.get(number, {}), told)) for number, told in found.forked.items()]
    parts = [f"The new run is {found.run}, {found.seconds:.1f} s."]
    for what, those in (("gone", found.gone), ("new", found.new)):
        if those:
            parts.append(f"Findings {what}: {', '.join(_finding(one.issue, one.node) for one in those)}.")
    title = f"fork of {found.parent} at round {found.at}: {found.change}"
    return shown.table(title, ("round", *_heads(names, "fork")), rows, " ".join(parts))


def of_culprit(found: Culprit) -> Shown:
    return shown.said("bisect", f"  {found}")


def _finding(issue: str, node: str | None) -> str:
    return issue if node is None else f"{issue} of {node}"


def _metrics(*told: Sequence[Mapping[str, float]]) -> list[str]:
    """Those that both have, in one round at least; of many, the two that everybody looks at."""
    known = [{name for one in those for name in one} for those in told]
    both = known[0] & known[1]
    return [name for name in USUAL if name in both] or sorted(both)


def _heads(names: Sequence[str], other: str) -> list[str]:
    return [head for name in names for head in (name, f"{name}, {other}", "difference")]


def _pairs(names: Sequence[str], before: Mapping[str, float], after: Mapping[str, float]) -> list[Cell]:
    cells: list[Cell] = []
    for name in names:
        a, b = before.get(name), after.get(name)
        cells += [a, b, None if a is None or b is None else b - a]
    return cells
