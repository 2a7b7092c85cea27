# SPDX-License-Identifier: Apache-2.0
"""How far apart two machines are if bits cannot match: this processor without its widest instructions, CUDA.

A run is recorded here and verified again in a process that may use other instructions (PyTorch's own switch); with a
GPU, a run recorded on it is verified there, and on the processor. From equal states, one round each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor
from fedvitals.replay.player.player import Player
from fedvitals.replay.player.proof import verify
from fedvitals.replay.tape.reader import open_tape
from fedvitals.replay.tape.tape import Tape

Row = dict[str, Any]
MODELS = ("mlp", "cnn")
CAPABILITIES = ("avx2", "default")
ROUNDS = 5
SWITCH = "ATEN_CPU_CAPABILITY"


def apart(folder: Path, tell: Callable[[str], None]) -> list[Row]:
    """Return for each model and pair of machines the largest deviation of a layer's norm, relative to the state's."""
    folder.mkdir(parents=True, exist_ok=True)
    store, found = folder / "runs.db", []
    for model in MODELS:
        tell(f"another processor, {model}")
        _record(store, model, "cpu")
        found += [
            {"model": model, "machines": f"CPU, {name}", **_elsewhere(store, model, name)} for name in CAPABILITIES
        ]
        if torch.cuda.is_available():
            tell(f"CUDA, {model}")
            run = f"{model}-cuda"
            _record(store, run, "cuda", model)
            found.append({"model": model, "machines": "the same GPU", **proved(store, run)})
            found.append({"model": model, "machines": "GPU, then CPU", **proved(store, run, device="cpu")})
    return found


def _record(store: Path, run: str, device: str, model: str | None = None) -> None:
    experiment = lab.Experiment(model=model or run, clients=10, rounds=ROUNDS, seed=1)
    how: dict[str, Any] = {"engine": "stacked", "device": device} if device != "cpu" else {"workers": 1}
    with Monitor(store, run, id=run, host="lab", probes="light", machine=False, tape=Tape(every=1)) as monitor:
        lab.run(experiment, monitor, **how)


def _elsewhere(store: Path, run: str, capability: str) -> Row:
    code = f"from fedvitals_studies.bench.replay.machines import say; say({str(store)!r}, {run!r})"
    done = subprocess.run(  # noqa: S603 - our own words
        [sys.executable, "-c", code],
        env={**os.environ, SWITCH: capability},
        capture_output=True,
        text=True,
        check=True,
    )
    told: Row = json.loads(done.stdout)
    return told


def say(store: str, run: str) -> None:
    """Print the result, as a separate process."""
    sys.stdout.write(json.dumps(proved(Path(store), run)))


def proved(store: Path, run: str, device: str | None = None) -> Row:
    tape = open_tape(store, run)
    with Player(tape, device=device) as player:
        rounds = [verify(player, number, number, tolerance=1.0) for number in tape.rounds]
        whole = verify(player, tolerance=1.0)
    return {
        "one_round": max(proof.deviation for proof in rounds),
        "all_rounds": whole.deviation,
        "exact": whole.exact or whole.deviation == 0,
    }
