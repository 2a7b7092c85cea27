# SPDX-License-Identifier: Apache-2.0
"""Every run's outcome as one line of JSON: what was planted, what was found when, and each case that was raised."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedvitals.errors import ConfigError
from fedvitals_studies.faultbank.report import OURS
from fedvitals_studies.faultbank.score import Outcome, Raised, Target, judge

FILE = "outcomes.jsonl"


def write_outcomes(outcomes: Sequence[Outcome], folder: Path) -> Path:
    """Write `outcomes.jsonl`, a line per run and per way in which it was examined. Returns the file."""
    path = folder / FILE
    with path.open("w", encoding="utf-8") as file:
        for line in _lines(outcomes):
            file.write(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n")
    return path


def read_cases(path: Path) -> frozenset[str]:
    """Return the names of the cases in a file of outcomes, plain or compressed: those that were examined before."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        return frozenset(str(json.loads(line)["case"]) for line in text.splitlines())
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as a fault bank's outcomes: {error}.") from error


def _lines(outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    for outcome in outcomes:
        judged = judge(outcome, OURS)
        line = {
            "case": outcome.case,
            "domain": outcome.domain,
            "topology": outcome.topology,
            "partition": outcome.partition,
            "clients": outcome.clients,
            "participation": outcome.participation,
            "rounds": outcome.rounds,
            "transformation": outcome.transformation,
            "control": outcome.control,
            "lying": outcome.lying or None,
            "level": outcome.level,
            "damage": None if outcome.damage is None else round(outcome.damage, 2),
            "attack": None if outcome.attack is None else round(outcome.attack, 3),
            "top": judged.top,
            "faults": [
                {"kind": fault.kind, "nodes": list(fault.nodes), "since": fault.since, "strength": fault.strength}
                for fault in outcome.faults
            ],
            "targets": [_target(target) for target in judged.targets],
            "raised": [_raised(case) for case in judged.raised],
        }
        yield {key: value for key, value in line.items() if value not in (None, [])}


def _target(target: Target) -> dict[str, Any]:
    line = {
        "kind": target.fault.kind,
        "node": target.node,
        "delay": None if math.isinf(target.delay) else target.delay,
        "located": None if math.isinf(target.located) else target.located,
        "hit": target.hit,
        "cause": target.cause,
    }
    return {key: value for key, value in line.items() if value is not None}


def _raised(case: Raised) -> list[Any]:
    """Return issue, place, first round, number of rounds, and verdict: right, wrong name, false or unjudged."""
    worth = "right" if case.right else "wrong name" if case.verdict == "true" else case.verdict
    return [case.issue, case.node or case.group, case.rounds[0], len(case.rounds), worth]
