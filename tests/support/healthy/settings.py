# SPDX-License-Identifier: Apache-2.0
"""Healthy trainings of mainstream kinds on which detectors were once wrong, for the suite and as a study of its own.

`python -m support.healthy.settings [SEEDS] [NAME ...]` prints the warnings and criticals of each setting; there must be
none. Each setting is a function of a monitor and a seed that trains a small federation to its end.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from typing import Any

import torch

import fedvitals as fv
from fedvitals import lab
from fedvitals.diagnosis.cases import Case, cases, is_trouble
from fedvitals.diagnosis.examine import examine
from fedvitals.protocols import History
from fedvitals.store import MemoryStore
from support.healthy.flower import FLOWER_COMPRESSIONS, compressed_flower, mixed_evaluation
from support.healthy.loops import HAND_COMPRESSIONS, ROUNDS, Setting, compressed_loop, loops


def judged(setting: Setting, seed: int = 0, **options: Any) -> list[Case]:
    """Train a setting under a monitor of its own, and return what all detectors say of it, as cases."""
    return cases(examine(trained(setting, seed, **options)))


def trained(setting: Setting, seed: int = 0, **options: Any) -> History:
    """Train a setting under a monitor of its own, and return what was measured."""
    torch.manual_seed(seed)
    store = MemoryStore()
    options.setdefault("privacy", getattr(setting, "keywords", {}).get("privacy", 3))
    with fv.Monitor(None, sinks=[store], machine=False, detectors=(), **options) as monitor:
        setting(monitor, seed)
    return store.history(monitor.run.id)


def troubles(cases: list[Case]) -> list[str]:
    return [f"{case.severity} {case.issue} {case.place}" for case in cases if is_trouble(case)]


# -- compression in the lab -------------------------------------------------------------------------------------------

LAB_COMPRESSIONS = {
    "fp16": lab.fp16(),
    "int8": lab.int8(),
    "top-k": lab.top_k(share=0.1),
    "pruning": lab.pruning(share=0.3),
}
LAB_MODELS = {"mlp": lab.mlp(hidden=[32]), "cnn": lab.cnn()}


def lab_setting(monitor: fv.Monitor, seed: int, *, faults: tuple[Any, ...] = (), **changes: Any) -> None:
    usual: dict[str, Any] = {
        "dataset": "digits",
        "model": LAB_MODELS["mlp"],
        "clients": 12,
        "rounds": ROUNDS,
        "partition": lab.dirichlet(1.0),
        "local": lab.Local(iterations=8, optimizer=lab.sgd(learning_rate=0.1)),
        "seed": seed,
    }
    lab.run(lab.Experiment(**usual | changes, faults=list(faults)), monitor, engine="sequential")


def settings() -> dict[str, Setting]:
    """Every setting by name."""
    return {
        **{
            f"lab {model}, {name}": functools.partial(lab_setting, model=LAB_MODELS[model], compression=compression)
            for model, (name, compression) in itertools.product(LAB_MODELS, LAB_COMPRESSIONS.items())
        },
        **{
            f"by hand, {name}": functools.partial(compressed_loop, compress=compress)
            for name, compress in HAND_COMPRESSIONS.items()
        },
        **{
            f"Flower, {name}, level {privacy}": functools.partial(compressed_flower, compress=change, privacy=privacy)
            for (name, change), privacy in itertools.product(FLOWER_COMPRESSIONS.items(), (2, 3))
        },
        **{
            f"Flower, two evaluations, {better} lower": functools.partial(mixed_evaluation, better=better)
            for better in ("server", "clients")
        },
        **loops(),
    }


def main(seeds: int, wanted: list[str]) -> None:
    """Print one line for each setting, and how many of them were silent."""
    chosen = {name: run for name, run in settings().items() if not wanted or any(word in name for word in wanted)}
    silent = 0
    for name, run in chosen.items():
        found: Counter[str] = Counter()
        notes: set[str] = set()
        for seed in range(seeds):
            told = judged(run, seed)
            found.update(f"{case.severity} {case.issue}" for case in told if is_trouble(case))
            notes |= {case.issue for case in told if not is_trouble(case)}
        silent += not found
        spoken = ", ".join(f"{count} {what}" for what, count in sorted(found.items())) or "none"
        print(f"| {name} | {seeds} | {spoken} | {', '.join(sorted(notes)) or 'none'} |", flush=True)  # noqa: T201
    print(f"{silent} of {len(chosen)} settings without warning or critical, {seeds} seeds each")  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| setting | seeds | warnings and criticals | notes |\n| --- | --- | --- | --- |")  # noqa: T201
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2:])
