# SPDX-License-Identifier: Apache-2.0
"""What fedvitals adds to Flower's rounds in simulation: seconds and bytes.

One run of `flower_patient.alternating` for each model: sections of rounds without and with fedvitals in turn, in the
same processes. The first round of a section is excluded; a section with fedvitals is compared with the mean of its two
neighbours without. The app's own diary measures both, at the end of each round. Clients of the large model train for
four steps only: rounds are short enough for many pairs, and training hides less of fedvitals' cost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvitals_studies.flower.app_folder import write_app
from fedvitals_studies.flower.simulation import FlowerError, SuperLink

Row = dict[str, Any]
Tell = Callable[[str], None]

NODES = 8
SECONDS = 1800.0  # the most for a run: on a busy machine rounds take several times as long
MODELS: Mapping[str, Mapping[str, Any]] = {
    "cnn": {"local-epochs": 20, "num-server-rounds": 3},
    "large": {"local-steps": 4, "num-server-rounds": 2, "learning-rate": 0.01},
}
BLOCKS = 51  # sections; the first and the last are without fedvitals


def measured(model: str, folder: Path, *, quick: bool, tell: Tell) -> Row:
    """Return the ratio of seconds per round with and without fedvitals, with the interval of its median, and bytes."""
    blocks = 5 if quick else BLOCKS
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
    """Return each watched section over its neighbours, from the diary: by the clock and in processor seconds."""
    bare, watched = _means(lines, "seconds")
    value, low, high = percent_over_neighbours(bare, watched)
    processors = percent_over_neighbours(*_means(lines, "cpu"))
    return {
        "overhead_percent": value,
        "low": low,
        "high": high,
        "cpu_percent": processors[0],
        "cpu_low": processors[1],
        "cpu_high": processors[2],
        "round_seconds": float(np.median(bare)),
        "round_cpu_seconds": float(np.median(_means(lines, "cpu")[0])),
        "watched_seconds": float(np.median(watched)),
        "pairs": len(watched),
    }


def _means(lines: Sequence[Mapping[str, Any]], what: str) -> tuple[list[float], list[float]]:
    """Return the mean of each section's rounds without the first, for those without and those with fedvitals."""
    steady: dict[int, list[float]] = {}
    for line in lines:
        if line["round"] > 1:
            steady.setdefault(line["block"], []).append(line[what])
    means = [float(np.mean(steady[block])) for block in sorted(steady)]
    return means[::2], means[1::2]


def percent_over_neighbours(bare: Sequence[float], watched: Sequence[float]) -> tuple[float, float, float]:
    """Return by how many per cent the watched ones are longer: the median over the pairs, and its 95 % interval."""
    pairs = zip(watched, bare, bare[1:], strict=False)
    ratios = np.array([2 * own / (before + after) if before + after else 1.0 for own, before, after in pairs])
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return tuple(100 * (float(ratio) - 1) for ratio in (np.median(ratios), low, high))  # type: ignore[return-value]


def bytes_of(letters: Path) -> Row:
    """Return the ratio of the largest message to the update that it came with, and their bytes."""
    lines = [json.loads(line) for line in letters.read_text(encoding="utf-8").splitlines()]
    return {
        "letter_bytes": max(line["letter"] for line in lines),
        "update_bytes": max(line["update"] for line in lines),
        "letter_percent": max(100 * line["letter"] / line["update"] for line in lines),
        "letters": sum(line["letter"] > 0 for line in lines),
    }
