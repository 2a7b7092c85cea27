# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals_studies.agents [FOLDER]`: train the runs, let the procedure decide, print the result."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from fedvitals.agents.tools import Tools
from fedvitals_studies.agents.planted_runs import JUDGED, TUNING, Truth, train
from fedvitals_studies.agents.procedure import Decision, decide
from fedvitals_studies.faultbank.intervals import share

BAR, BYTES = 0.85, 20_000


def judged(store: Path, truths: list[Truth]) -> dict[str, object]:
    """Let the procedure decide each run; how many it got right, and how many bytes it had to read."""
    tools = Tools(store)
    decisions: list[tuple[Truth, Decision]] = [(truth, decide(tools, truth.run)) for truth in truths]
    rows = [
        {**asdict(truth), "named": decision.client, "named_cause": decision.cause, "bytes": decision.bytes,
         "calls": decision.calls, "right": (decision.client, decision.cause) == (truth.client, truth.cause)}
        for truth, decision in decisions
    ]  # fmt: skip
    right = sum(bool(row["right"]) for row in rows)
    estimate = share([float(bool(row["right"])) for row in rows], [1.0] * len(rows))
    return {
        "runs": len(rows), "right": right, "share": right / len(rows), "interval": [estimate.low, estimate.high],
        "most_bytes": max(decision.bytes for _, decision in decisions), "decisions": rows,
    }  # fmt: skip


def main() -> None:
    """Train and judge both sets; only the second one counts."""
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, seed in (("tuning", TUNING), ("judged", JUDGED)):
            store = Path(folder, f"{name}.db")
            results[name] = judged(store, train(store, seed))
            result = results[name]
            print(f"{name}: {result['right']} of {result['runs']} right ({result['share']:.0%}), interval "  # noqa: T201
                  f"{result['interval']}, at most {result['most_bytes']} bytes a run")  # fmt: skip
    met = float(str(results["judged"]["share"])) >= BAR and int(str(results["judged"]["most_bytes"])) < BYTES
    print(f"bars (right ≥ {BAR:.0%}, < {BYTES} bytes a run): {'met' if met else 'MISSED'}")  # noqa: T201
    if len(sys.argv) > 1:
        Path(sys.argv[1], "result.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
