# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals_studies.adapters RESULTS.jsonl [--part texts] [--tuning | --first-seed N]`: run a part of the
study, or go on with it, and print it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from fedvitals_studies.adapters.study import (
    HEALTHY_RUNS,
    PARTS,
    PLANTED_RUNS,
    TUNING_SEED,
    Judged,
    run_study,
    summary,
)


def main() -> None:
    """Run the study; `--tuning`: on the seeds that limits may be set by."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--part", choices=[*PARTS], default="adapters")
    parser.add_argument("--tuning", action="store_true")
    parser.add_argument("--first-seed", type=int, help="of another set than the part's own")
    parser.add_argument("--planted", type=int, default=PLANTED_RUNS)
    parser.add_argument("--healthy", type=int, default=HEALTHY_RUNS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    part = PARTS[chosen.part]
    first_seed = TUNING_SEED if chosen.tuning else chosen.first_seed
    if first_seed is not None:
        part = dataclasses.replace(part, first_seed=first_seed)
    sys.stdout.write(summary(run_study(chosen.results, part, chosen.planted, chosen.healthy, _tell)) + "\n")


def _tell(run: Judged) -> None:
    sys.stdout.write(f"{run.seed} {run.fault} onset {run.onset} named {run.named} {run.seconds} s {run.alarms}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
