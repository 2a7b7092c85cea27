# SPDX-License-Identifier: Apache-2.0
"""Records single operators with torch's profiler, over a few steps of a few clients, never over a whole run.

    Monitor("runs.db", capture=Capture(rounds=(3,), nodes=("c7",), steps=(5, 10)))

It records from before the sixth step's forward pass to before the eleventh's. The result is the operators that took
most time or memory of their own, as the event `profile.operators`; the trace itself is not kept. While it records,
steps take longer: their times are not comparable with those of other rounds. The training's results are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedvitals.errors import ConfigError
from fedvitals.records import AnyName, node_name

OPERATORS = "profile.operators"
MOST_STEPS = 20
MOST_CLIENT_ROUNDS = 20
TOP = 20  # operators that are reported


@dataclass(frozen=True, slots=True)
class Capture:
    """Which training steps to record with torch's profiler; pass it as `Monitor(capture=...)`.

    Args:
        rounds: The rounds in which to record.
        nodes: The clients to record; empty: every client of these rounds.
        steps: First step, counted from 0, and the step before which to stop: `(5, 10)` are the sixth to the tenth.
    """

    rounds: tuple[int, ...] = (1,)
    nodes: tuple[AnyName, ...] = ()
    steps: tuple[int, int] = (2, 7)  # a client's first steps include one-time setup

    def __post_init__(self) -> None:
        numbers = [*self.rounds, *self.steps]
        if len(self.steps) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
            raise ConfigError(f"Capture takes whole numbers from 0 on: got rounds={self.rounds}, steps={self.steps}.")
        first, last = self.steps
        if not 1 <= last - first <= MOST_STEPS:
            raise ConfigError(f"Capture records 1 to {MOST_STEPS} steps of a client; got steps={self.steps}.")
        if not self.rounds or len(self.rounds) * max(1, len(self.nodes)) > MOST_CLIENT_ROUNDS:
            raise ConfigError(
                f"Capture records at most {MOST_CLIENT_ROUNDS} client-rounds, and at least one; "
                f"got {len(self.rounds)} rounds of {len(self.nodes) or 'all'} clients."
            )


class Captures:
    """Decides, for one process, which client is recorded, and how many more may be."""

    def __init__(self, wanted: Capture | None) -> None:
        self._wanted = wanted
        self._left = MOST_CLIENT_ROUNDS

    def begin(
        self, node: str, round_index: int | None, model: Any, report: Callable[[Exception, str], None]
    ) -> Recording | None:
        """Return a recording of this client, to be closed with it; None if it is not to be recorded."""
        wanted = self._wanted
        if wanted is None or round_index not in wanted.rounds or not self._left:
            return None
        if wanted.nodes and node not in map(node_name, wanted.nodes):
            return None
        self._left -= 1
        return Recording(model, wanted.steps, report)


class Recording:
    """The recording of one client: starts and stops by itself at the forward passes of the chosen steps, or with the
    client.
    """

    def __init__(self, model: Any, steps: tuple[int, int], report: Callable[[Exception, str], None]) -> None:
        self._first, self._last = steps
        self._forwards = 0
        self._report = report
        self._profiler: Any = None
        self._recorded = 0
        self._running = False
        self._handle = model.register_forward_pre_hook(self._forward)

    def _forward(self, _model: Any, _inputs: Any) -> None:
        import torch  # noqa: PLC0415 - reading recorded events does not need it

        if not torch.is_grad_enabled():
            return
        try:
            if self._forwards == self._first:
                self._refuse_company(torch.autograd)
                self._profiler = torch.profiler.profile(profile_memory=True, acc_events=True)
                self._profiler.start()
                self._running = True
            elif self._forwards == self._last:
                self._stop()
        except Exception as error:  # noqa: BLE001 - another profiler may be active; the training goes on
            self._profiler, self._running = None, False
            self._report(error, "recording operators")
        self._forwards += 1

    def _refuse_company(self, autograd: Any) -> None:
        """Raise ConfigError if another profiler is active: torch has one at a time, and ours would end the user's."""
        if autograd._profiler_enabled():  # noqa: SLF001 - torch offers no public way to ask
            raise ConfigError("Another profiler is running: this client's operators are not recorded.")

    def _stop(self) -> None:
        if self._running:
            self._running = False
            self._recorded = min(self._forwards, self._last) - self._first
            self._profiler.stop()
        self._handle.remove()

    def close(self) -> None:
        """Stop recording. A second call does nothing."""
        self._handle.remove()
        if self._running:
            self._stop()

    def finish(self) -> tuple[str, dict[str, Any]] | None:
        """Return text and data of the event `profile.operators`; None if no step was recorded."""
        self.close()
        if self._profiler is None or self._recorded < 1:
            return None
        rows = ranked(self._profiler.key_averages())
        self._profiler = None
        if not rows:
            return None
        first = rows[0]
        text = f"{self._recorded} steps recorded; {first['name']} took most, {first['seconds']:.4f} s of its own."
        return text, {"steps": [self._first, self._first + self._recorded], "operators": rows}


def ranked(averages: Any, top: int = TOP) -> list[dict[str, Any]]:
    """Return the operators with the most time of their own, and those with the most memory, as plain rows."""
    rows = [
        {
            "name": str(operator.key)[:100],
            "calls": int(operator.count),
            "seconds": operator.self_cpu_time_total / 1e6,
            "device_seconds": getattr(operator, "self_device_time_total", 0.0) / 1e6,
            "bytes": int(operator.self_cpu_memory_usage + getattr(operator, "self_device_memory_usage", 0)),
        }
        for operator in averages
        if not str(operator.key).startswith(("ProfilerStep", "[memory]"))
    ]
    by_time = sorted(rows, key=lambda row: row["seconds"] + row["device_seconds"], reverse=True)
    by_memory = sorted(rows, key=lambda row: row["bytes"], reverse=True)
    chosen = [*by_time[: top - top // 4], *(row for row in by_memory[: top // 4] if row["bytes"] > 0)]
    unique = list({row["name"]: row for row in chosen}.values())
    return sorted(unique, key=lambda row: row["seconds"] + row["device_seconds"], reverse=True)
