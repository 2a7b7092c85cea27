# SPDX-License-Identifier: Apache-2.0
"""What fedvitals adds to Flower's rounds in simulation: seconds and bytes.

One run of `flower_patient.alternating` for each model: stretches of rounds without and with fedvitals in turn, in the
same processes. The first round of a stretch is left out; a stretch with fedvitals is compared with the mean of its two
neighbours without. The app's own clock, which looks at the end of each round, measures both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvitals.trials.flower_app import write_app
from fedvitals.trials.flower_run import FlowerError, SuperLink

Row = dict[str, Any]
Tell = Callable[[str], None]

NODES = 8
SECONDS = 900.0
MODELS: Mapping[str, Mapping[str, Any]] = {
    "cnn": {"local-epochs": 10, "num-server-rounds": 6},
    "large": {"local-steps": 10, "num-server-rounds": 4, "learning-rate": 0.01},
}
BLOCKS = {"cnn": 21, "large": 13}  # stretches; the first and the last are without fedvitals


def measured(model: str, folder: Path, *, quick: bool, tell: Tell) -> Row:
    """Seconds of a round with fedvitals over those without, with the interval of their median, and bytes."""
    blocks = 5 if quick else BLOCKS[model]
    tell(f"{model}: {blocks} stretches of rounds, without and with fedvitals in turn")
    results = folder / model
    results.mkdir(parents=True)
    settings = {**MODELS[model], "model": model, "blocks": blocks, "warm-up": True}
    with SuperLink() as link:
        app = write_app(folder / f"app-{model}", "alternating")
        store = folder / f"{model}.db"
        log = link.simulate(app, settings | {"results": results, "store": store}, nodes=NODES, seconds=SECONDS)
    if not (results / "rounds.json").exists():
        raise FlowerError(f"The run of the model '{model}' left no results:\n{log[-4000:]}")
    lines = json.loads((results / "rounds.json").read_text(encoding="utf-8"))
    return {"model": model, **ratio_of(lines), **bytes_of(results / "letters.jsonl")}


def ratio_of(lines: Sequence[Mapping[str, Any]]) -> Row:
    """Of the diary's lines: each watched stretch over its neighbours."""
    steady: dict[int, list[float]] = {}
    for line in lines:
        if line["round"] > 1:
            steady.setdefault(line["block"], []).append(line["seconds"])
    means = {block: float(np.mean(seconds)) for block, seconds in steady.items()}
    bare = [means[block] for block in sorted(means) if block % 2 == 0]
    watched = [means[block] for block in sorted(means) if block % 2 == 1]
    ratios = np.array([2 * own / (before + after) for own, before, after in zip(watched, bare, bare[1:], strict=False)])
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {
        "overhead_percent": 100 * (float(np.median(ratios)) - 1),
        "low": 100 * (float(low) - 1),
        "high": 100 * (float(high) - 1),
        "round_seconds": float(np.median(bare)),
        "watched_seconds": float(np.median(watched)),
        "pairs": len(ratios),
    }


def bytes_of(letters: Path) -> Row:
    """The largest letter over the update that it rode with, and their bytes."""
    lines = [json.loads(line) for line in letters.read_text(encoding="utf-8").splitlines()]
    return {
        "letter_bytes": max(line["letter"] for line in lines),
        "update_bytes": max(line["update"] for line in lines),
        "letter_percent": max(100 * line["letter"] / line["update"] for line in lines),
        "letters": sum(line["letter"] > 0 for line in lines),
    }
