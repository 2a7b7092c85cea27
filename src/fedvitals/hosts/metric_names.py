# SPDX-License-Identifier: Apache-2.0
"""Metrics as passed by frameworks: numbers and lists of numbers, under their users' names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

LOSSES = ("loss", "train_loss", "train-loss", "eval_loss", "eval-loss", "val_loss", "test_loss")
ACCURACIES = ("accuracy", "acc", "eval_acc", "eval-acc", "eval_accuracy", "val_accuracy", "test_accuracy")
LOG_LOSS = re.compile(r"(.*[-_])?m?log_?loss")  # its name in XGBoost and scikit-learn
LISTED = 32  # limit up to which each number of a list is kept


def with_known_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with the loss and accuracy under the names that have a meaning here."""
    renamed = dict(metrics)
    log_losses = tuple(name for name in metrics if LOG_LOSS.fullmatch(name))
    for own, names in (("loss", (*LOSSES, *log_losses)), ("accuracy", ACCURACIES)):
        first = next((name for name in names if name in metrics), None)
        if first is not None:
            renamed[own] = renamed.pop(first)
    return renamed


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among metrics. A list becomes `name.0`, `name.1`, ...; a long one its length and extremes.

    Anything else is left out.
    """
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, int | float):
            numbers[name] = float(value)
        elif isinstance(value, list | tuple) and value and all(isinstance(entry, int | float) for entry in value):
            numbers |= _numbers_of_list(name, value)
    return numbers


def _numbers_of_list(name: str, values: Sequence[float]) -> dict[str, float]:
    if len(values) <= LISTED:
        return {f"{name}.{position}": float(value) for position, value in enumerate(values)}
    mean = sum(map(float, values)) / len(values)
    return {
        f"{name}.length": float(len(values)),
        f"{name}.mean": mean,
        f"{name}.min": float(min(values)),
        f"{name}.max": float(max(values)),
    }


def as_train_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return averaged metrics of the clients' training under names that do not occur in an evaluation."""
    return {name if name.startswith("train") else f"train_{name}": value for name, value in metrics.items()}
