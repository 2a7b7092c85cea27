# SPDX-License-Identifier: Apache-2.0
"""Are the three stated probabilities right? `python -m fedvitals_studies.faultbank.level_reliability FOLDER [BANK]`.

FOLDER holds a bank's outcomes. Every case about a client counts once, by its newest alarm, as runs are and with
culprits that lie: something is wrong with the client, the family, the exact cause, each with its probability
(`diagnosis.cause_levels`) beside the share of cases in which it was so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fedvitals.diagnosis.cause_levels import LEARNT, cause_levels
from fedvitals_studies.faultbank.accepted import FAMILY_OF, cause_is_right
from fedvitals_studies.faultbank.cases import read_bank
from fedvitals_studies.faultbank.examine import read_all
from fedvitals_studies.faultbank.intervals import Bin, calibration
from fedvitals_studies.faultbank.report import OURS
from fedvitals_studies.faultbank.score import Alarm, Outcome, Planted

LEVELS = ("wrong", "family", "cause")
BINS = 5
JOINED = " and "  # between the views of an alarm

Stated = dict[str, tuple[float, bool]]
"""By level: the stated probability, and whether it was so."""


def statements(outcome: Outcome) -> Iterator[tuple[bool, Stated]]:
    """Yield for each client's case whether only the learnt evidence made it, and what it stated."""
    newest: dict[tuple[str, str], Alarm] = {}
    for alarm in outcome.methods.get(OURS, ()):
        if alarm.node in outcome.present and alarm.severity != "note" and alarm.causes and alarm.node is not None:
            newest[alarm.issue, alarm.node] = alarm
    for (_, node), alarm in newest.items():
        views = (alarm.view or "").split(JOINED)
        levels = cause_levels(alarm.confidence, alarm.causes, views)
        acting = [fault for fault in outcome.faults if node in fault.nodes and fault.since <= alarm.round]
        yield bool(LEARNT & {*views}), _beside_truth(levels["wrong"], levels["family"], levels["cause"], acting)


def _beside_truth(
    wrong: float, family: tuple[str, float], cause: tuple[str, float], acting: Sequence[Planted]
) -> Stated:
    return {
        "wrong": (wrong, bool(acting)),
        "family": (family[1], any(FAMILY_OF.get(fault.kind) == family[0] for fault in acting)),
        "cause": (cause[1], any(cause_is_right(cause[0], fault.kind, fault.issue) for fault in acting)),
    }


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the reliability of each level as Markdown, the learnt evidence separate from exact tests."""
    by_part: dict[str, dict[str, list[list[tuple[float, bool]]]]] = {}
    for outcome in outcomes:
        if outcome.level is not None:
            continue
        for learnt, stated in statements(outcome):
            part = by_part.setdefault("learnt evidence" if learnt else "exact, data, own past", {})
            for level, pair in stated.items():
                part.setdefault(level, []).append([pair])
    lines = ["| by | level | cases | error | stated → so |", "| --- | --- | --- | --- | --- |"]
    for name, levels in by_part.items():
        for level in LEVELS:
            error, bins = calibration(levels[level], BINS)
            lines.append(f"| {name} | {level} | {len(levels[level])} | {error.value:.3f} | {_bins(bins)} |")
    return "\n".join(lines)


def _bins(bins: Sequence[Bin]) -> str:
    return ", ".join(f"{each.stated:.2f} → {each.observed:.2f} ({each.count})" for each in bins)


def main(folder: str, bank: str = "tune-wide") -> None:
    outcomes, _ = read_all(read_bank(bank).cases, Path(folder))
    print(table(outcomes))  # noqa: T201 - it is run by hand


if __name__ == "__main__":
    main(*sys.argv[1:])
