# SPDX-License-Identifier: Apache-2.0
"""The paper's three scenarios, recognised in one run: `python -m fedvitals_studies.faultbank.scenarios [REPEATS]`.

Baseline, exploding and vanishing networks train on GTSRB for four rounds; the answer is what the gradient detectors
report by round 3. Any report on a converging run counts as a false alarm.
"""

from __future__ import annotations

import sys
from collections import Counter

from fedvitals import lab
from fedvitals.diagnosis.examine import examine
from fedvitals.monitor.monitor import Monitor
from fedvitals.store import MemoryStore

SCENARIOS = {"baseline": "", "exploding": "EXPLODING_GRADIENT", "vanishing": "VANISHING_GRADIENT"}
TOPOLOGIES = (lab.Centralized(), lab.Hierarchical(edges=2))
ROUNDS = 4


def answer(scenario: str, seed: int) -> str:
    """Return the answer for one run: the issue among those of SCENARIOS, or everything reported instead."""
    clip = lab.Clip(1.0) if scenario == "baseline" else None
    experiment = lab.Experiment(
        dataset=lab.GTSRB(samples=4000, test_samples=500),
        model=lab.PaperCNN(scenario=scenario, channels=(16, 32)),
        local=lab.Local(iterations=10, optimizer=lab.Adam(1e-3), clip=clip),
        clients=6,
        rounds=ROUNDS,
        topology=TOPOLOGIES[seed % 2],
        seed=seed,
    )
    store = MemoryStore()
    with Monitor(None, host="lab", sinks=[store], detectors=()) as monitor:
        lab.run(experiment, monitor, engine="reuse", workers=1)
        run = monitor.run.id
    said = {finding.issue for finding in examine(store.history(run)) if finding.severity != "note"}
    known = [code for code in SCENARIOS.values() if code in said]
    return known[0] if len(known) == 1 else " ".join(sorted(said))


def main(repeats: int) -> None:
    right = 0
    for scenario, code in SCENARIOS.items():
        answers = Counter(answer(scenario, seed) for seed in range(repeats))
        right += answers[code]
        say(f"{scenario:10} {answers[code]} of {repeats} right; all answers: {dict(answers)}")
    say(f"told apart by round {ROUNDS - 1}: {right} of {3 * repeats} ({right / (3 * repeats):.1%})")


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a study that is run by hand


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
