# SPDX-License-Identifier: Apache-2.0
"""Our side of `fedvitals bench lab`, in a separate process: it answers as the peers do (studies/peers/work.py)."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor
from fedvitals.protocols import NullObserver
from fedvitals_studies.bench.lab.work import Subject


def main() -> None:
    given = arguments()
    subject = Subject(given.model, given.clients, given.iterations)
    with tempfile.TemporaryDirectory() as folder:
        observer = observer_of(given.watch, Path(folder), given.update_memory)
        serve(subject, observer, given)
        if isinstance(observer, Monitor):
            observer.close()
            if observer.lost:
                answer(failed=f"The monitor lost {observer.lost} records.")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("cnn", "mlp"))
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--watch", default="standard", help="a preset of probes, or nothing")
    parser.add_argument("--update-memory", type=int, default=None, help="bytes")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--data", default=None)
    return parser.parse_args()


def observer_of(watch: str, folder: Path, update_memory: int | None = None) -> Monitor | NullObserver:
    """Return a monitor with its store in the folder, or an observer that does nothing."""
    if watch == "nothing":
        return NullObserver()
    if update_memory is None:
        return Monitor(folder / "runs.db", "bench", probes=watch, host="lab")
    return Monitor(folder / "runs.db", "bench", probes=watch, host="lab", update_memory=update_memory)


def serve(subject: Subject, observer: Monitor | NullObserver, options: argparse.Namespace) -> None:
    """Run one round for each line that requests it; a round's time includes writing what remains of it."""
    rounds: Iterator[lab.Result] = lab.rounds(
        subject.experiment(options.data), observer, engine=options.engine, workers=options.workers, data=options.data
    )
    result: lab.Result | None = None
    answer(ready=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "quit":
            break
        if command == "test":
            assert result is not None  # noqa: S101 - never requested before the first round
            answer(accuracy=accuracy(result, options.data), engine=result.engine)
            continue
        count = int(command.removeprefix("round") or 1)  # `round10`: ten of them, if one is too short to be timed
        began = time.perf_counter()
        for _ in range(count):
            result = next(rounds)
        if isinstance(observer, Monitor):
            observer.flush()
        seconds = time.perf_counter() - began
        assert result is not None  # noqa: S101 - at least one round was done
        last = [float(losses[-1]) for losses in result.rounds[-1].losses.values()]
        answer(seconds=seconds, steps=count * subject.steps, loss=float(np.mean(last)))
    rounds.close()  # type: ignore[attr-defined]  # a generator: its processes end here


@torch.no_grad()
def accuracy(result: lab.Result, data: str | None) -> float:
    """Return the accuracy of the current global model on the test set."""
    dataset = lab.Site.of(result.experiment, data).dataset
    x, y = dataset.inputs(dataset.test_x), dataset.test_y
    hits = [result.model(a).argmax(1) == b for a, b in zip(x.split(256), y.split(256), strict=True)]
    return float(torch.cat(hits).double().mean())


def answer(**facts: object) -> None:
    print("@" + json.dumps(facts), flush=True)  # noqa: T201 - this is how the benchmark is answered


if __name__ == "__main__":
    main()
