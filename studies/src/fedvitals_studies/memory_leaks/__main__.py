# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals_studies.memory_leaks RESULTS`: run the planted leaks."""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from fedvitals_studies.memory_leaks.study import HEALTHY_RUNS, LEAKS, run_healthy, run_leak


def main() -> None:
    """Run the leaks one after the other, or those that are named; `healthy`: federations without one."""
    results, kinds = Path(sys.argv[1]), sys.argv[2:] or [*LEAKS]
    results.mkdir(parents=True, exist_ok=True)
    if kinds == ["healthy"]:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(HEALTHY_RUNS) as pool:
            runs = [*pool.map(run_healthy, [Path(folder)] * HEALTHY_RUNS, range(HEALTHY_RUNS))]
        (results / "healthy.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            rows.append(asdict(run_leak(kind, Path(folder), [*LEAKS].index(kind))))
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.flush()
    (results / "leaks.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
