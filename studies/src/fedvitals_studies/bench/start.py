# SPDX-License-Identifier: Apache-2.0
"""How quickly the command line answers, and what it loads for that."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import numpy as np

_LOADED = "import sys, json; {}; print(json.dumps(sorted(m for m in ('torch', 'numpy', 'rich') if m in sys.modules)))"


def bench_start(*, quick: bool = False) -> list[dict[str, Any]]:
    """Return wall times of fresh processes, median of several, with that of a Python that does nothing."""
    repeats = 5 if quick else 15
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import fedvitals": [sys.executable, "-c", "import fedvitals"],
        "fedvitals --help": [sys.executable, "-m", "fedvitals", "--help"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - our own interpreter
            times[name].append(time.perf_counter() - started)
    help_loads = "from fedvitals.cli.main import app; app.main(['--help'], standalone_mode=False)"
    loads = {"import fedvitals": "import fedvitals", "fedvitals --help": help_loads}
    return [
        {
            "what": name,
            "milliseconds": 1e3 * float(np.median(found)),
            "loads": _loaded(loads[name]) if name in loads else "",
        }
        for name, found in times.items()
    ]


def _loaded(statement: str) -> str:
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", _LOADED.format(statement)], check=True, capture_output=True, text=True
    )
    return ", ".join(json.loads(done.stdout.splitlines()[-1])) or "none of torch, numpy, rich"
