# SPDX-License-Identifier: Apache-2.0
"""Run federations outside the lab and count what is found.

    python -m fedvitals_studies.outside mend|judge [OUTCOMES.jsonl] [--seed 1] [--only label_flip] [--times 5]

Prints, by fault: culprits, found in time under the right name, accused in time under any name, and cases of healthy
clients; then how many cases healthy runs have per 100 rounds. A culprit is found if its issue is raised in the round of
the onset or the five after it.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals_studies.outside.federation import Setting, drawn, federate
from fedvitals_studies.outside.tasks import HALVES

IN_TIME = 5  # rounds after the onset
# Strengths, and the issues that are right. «repeated» (each sample twice) is harmless: nobody is to be accused.
FAULTS: dict[str, tuple[tuple[float, ...], frozenset[str]]] = {
    "label_flip": ((1.0,), frozenset({"LABEL_FLIP"})),
    "label_noise": ((0.4, 0.7, 1.0), frozenset({"LABEL_NOISE"})),
    "input_noise": ((1.0, 2.0), frozenset({"INPUT_NOISE"})),
    "input_scale": ((0.1, 10.0), frozenset({"INPUT_SCALE"})),
    "constant": ((1.0,), frozenset({"INPUT_SCALE", "INPUT_NOISE", "UNUSUAL_CLIENT"})),
    "missing_classes": ((1.0,), frozenset({"MISSING_CLASSES"})),
    "rate": ((0.1, 10.0), frozenset({"WRONG_LEARNING_RATE"})),
    "zero": ((1.0,), frozenset({"FREE_RIDER"})),
    "stale": ((1.0,), frozenset({"STALE_UPDATE"})),
    "sign_flip": ((1.0,), frozenset({"BYZANTINE"})),
    "scaled": ((10.0,), frozenset({"BYZANTINE"})),
    "nan": ((1.0,), frozenset({"NAN_UPDATE", "NAN_WEIGHTS", "NAN_GRADIENT"})),
    "repeated": ((1.0,), frozenset()),
}
HEALTHY = 3  # times as many healthy runs as runs of one fault


@dataclasses.dataclass
class Outcome:
    """What was said about one run."""

    setting: Setting
    quality: float
    culprits: list[str]
    found: list[str]  # culprits whose issue was raised in time
    accused: list[str]  # culprits of whom any issue was raised in time
    wrong: list[str]  # issues of culprits that are not theirs
    false: list[str]  # «node: issue» of healthy clients
    whole: list[str]  # issues of the whole run
    seconds: float


def settings(half: str, seed: int, times: int) -> Iterator[Setting]:
    """Yield the settings of one half."""
    start = 10_000 * seed + 1_000_000 * [*HALVES].index(half)
    for place, (fault, (strengths, _)) in enumerate(FAULTS.items()):
        for number in range(times):
            setting = drawn(half, fault, strengths, number + place, start + 100 * place + number)
            if applies(setting):
                yield setting
    for number in range(HEALTHY * times):
        yield drawn(half, None, (0.0,), number, start + 5000 + number)


def applies(setting: Setting) -> bool:
    """Return whether a task can have the fault: tokens have no noise and no scale, numbers no classes."""
    task = HALVES[setting.half][setting.task].__name__
    if task == "sequences":
        return setting.fault not in ("input_noise", "input_scale", "constant")
    return task != "houses" or setting.fault not in ("label_flip", "missing_classes")


def run(setting: Setting) -> Outcome:
    """Train one federation and compare what is found with the truth."""
    begun = time.perf_counter()
    findings, culprits, quality = federate(setting)
    right = FAULTS[setting.fault][1] if setting.fault else frozenset()
    timely = [f for f in findings if f.severity != "note" and 0 <= (f.where.round or 0) - setting.onset <= IN_TIME]
    found = sorted({f.where.node for f in timely if f.where.node in culprits and f.issue in right})
    accused = sorted({f.where.node for f in timely if f.where.node in culprits and _accuses(f.issue)})
    wrong = [f"{c.node}: {c.issue}" for c in findings.cases if c.node in culprits and c.issue not in right]
    false = [
        f"{c.node}: {c.issue} @{c.first}"
        for c in findings.cases
        if c.node is not None and c.node != "server" and c.node not in culprits
    ]
    whole = [f"{c.group or ''}{c.issue} @{c.first}" for c in findings.cases if c.node in (None, "server")]
    return Outcome(setting, quality, culprits, found, accused, wrong, false, whole, time.perf_counter() - begun)


def _accuses(issue: str) -> bool:
    return ISSUES_BY_CODE[issue].family != "system"


def _without_system(cases: list[str]) -> list[str]:
    return [case for case in cases if _accuses(case.split(": ")[-1].split(" @")[0])]


def table(outcomes: list[Outcome]) -> str:
    """Return the table of all faults, and what healthy runs said."""
    lines = ["| fault | runs | found, of culprits | accused | wrong names | healthy clients accused |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    by_fault: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_fault.setdefault(outcome.setting.fault or "", []).append(outcome)
    healthy = by_fault.pop("", [])
    groups = {**by_fault, "all but repeated": [o for o in outcomes if o.setting.fault not in (None, "repeated")]}
    for fault, own in groups.items():
        counts = [
            sum(map(len, values)) for values in zip(*((o.culprits, o.found, o.accused) for o in own), strict=True)
        ]
        wrong, false = (
            sum(len(_without_system(cases)) for cases in kind)
            for kind in ([o.wrong for o in own], [o.false for o in own])
        )
        lines.append(f"| {fault} | {len(own)} | {counts[1]} of {counts[0]} | {counts[2]} | {wrong} | {false} |")
    rounds = sum(o.setting.rounds for o in healthy)
    cases = sum(len(_without_system(o.false)) + len(o.whole) for o in healthy)
    lines += ["", f"Healthy runs: {len(healthy)}, {rounds} rounds, {cases} cases."]
    return "\n".join(lines)


@click.command()
@click.argument("half", type=click.Choice([*HALVES]))
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--seed", default=1)
@click.option("--times", default=5, help="Runs of each fault.")
@click.option("--only", help="One fault, or «healthy».")
@click.option("--verbose", is_flag=True)
def main(half: str, path: Path | None, seed: int, times: int, only: str | None, *, verbose: bool) -> None:
    """Run one half."""
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    for setting in settings(half, seed, times):
        if only and (setting.fault or "healthy") != only:
            continue
        outcomes.append(run(setting))
        if verbose:
            click.echo(json.dumps(dataclasses.asdict(outcomes[-1])), err=True)
        if path is not None:
            with path.open("a") as lines:
                lines.write(json.dumps(dataclasses.asdict(outcomes[-1])) + "\n")
    click.echo(table(outcomes))


def read(path: Path) -> list[Outcome]:
    """Read the outcomes of an earlier run."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return [Outcome(**{**row, "setting": Setting(**row["setting"])}) for row in rows]


if __name__ == "__main__":
    main()
