# SPDX-License-Identifier: Apache-2.0
"""Save and load the state of a run: tensors as safetensors, everything else as JSON. Nothing is ever unpickled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.lab.experiment import Experiment
from fedvitals.lab.federation import ServerState

if TYPE_CHECKING:
    from fedvitals.lab.run import Round

FILE = "state.safetensors"


class Checkpoint:
    """The saved state of a run in one file, replaced atomically: a run killed while saving resumes from the round
    before.
    """

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        try:
            import safetensors.torch  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            raise MissingExtraError("safetensors", "lab", "Saving a run's state") from error
        self._tensors = safetensors
        self._file, self._digest = folder / FILE, experiment.digest()
        folder.mkdir(parents=True, exist_ok=True)

    def engine_for(self, wanted: str) -> str:
        """Return the engine to resume with. Results are bit-identical only within one engine."""
        before = "auto"
        if self._file.exists():
            with self._tensors.safe_open(self._file, framework="pt") as opened:
                before = (opened.metadata() or {}).get("engine", "auto")
        if "auto" not in (before, wanted) and before != wanted:
            raise ConfigError(
                f"This run was begun with the engine '{before}' and would not go on bit for bit with '{wanted}'. "
                "Resume it without naming an engine."
            )
        return before if wanted == "auto" else wanted

    def save(self, server: ServerState, rounds: int, history: list[Round], engine: str = "auto") -> None:
        tensors = {"model": server.model}
        tensors |= {f"memory/{key}": tensor for key, tensor in server.memory.items()}
        tensors |= {f"past/{i}": tensor for i, tensor in enumerate(server.past)}
        notes = {
            "experiment": self._digest,
            "rounds": str(rounds),
            "engine": engine,
            "clock": float(server.clock).hex(),
            "notes": json.dumps(server.notes),
            "history": json.dumps([[r.number, r.seconds, r.metrics] for r in history]),
        }
        partial = self._file.with_suffix(".partial")
        here = {key: t.to("cpu", copy=True).contiguous() for key, t in tensors.items()}
        self._tensors.torch.save_file(here, partial, notes)
        os.replace(partial, self._file)  # noqa: PTH105 - atomic

    def load(self, fresh: ServerState) -> tuple[ServerState, int, list[Round]]:
        """Return the saved server on the CPU, the next round, and the rounds so far; `fresh`, 0 and none if nothing is
        saved.
        """
        from fedvitals.lab.run import Round  # noqa: PLC0415 - run imports us

        if not self._file.exists():
            return fresh, 0, []
        with self._tensors.safe_open(self._file, framework="pt") as opened:
            notes: dict[str, str] = opened.metadata() or {}
            tensors: dict[str, Tensor] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        if notes.get("experiment") != self._digest:
            raise ConfigError(
                f"{self._file} is the state of another experiment (or of an earlier version of this one). "
                "Resume with the experiment that it was saved by, or start afresh in another folder."
            )
        server = ServerState(
            tensors["model"],
            {key.removeprefix("memory/"): t for key, t in tensors.items() if key.startswith("memory/")},
            json.loads(notes["notes"]),
            float.fromhex(notes["clock"]),
            [tensors[f"past/{i}"] for i in range(sum(key.startswith("past/") for key in tensors))],
        )
        history = [Round(number, seconds, metrics) for number, seconds, metrics in json.loads(notes["history"])]
        return server, int(notes["rounds"]), history
