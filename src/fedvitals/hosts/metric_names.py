# SPDX-License-Identifier: Apache-2.0
"""Names by which frameworks and their users call the loss and the accuracy."""

from __future__ import annotations

from collections.abc import Mapping

LOSSES = ("loss", "train_loss", "train-loss", "eval_loss", "eval-loss", "val_loss", "test_loss")
ACCURACIES = ("accuracy", "acc", "eval_acc", "eval-acc", "eval_accuracy", "val_accuracy", "test_accuracy")


def with_known_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with the loss and accuracy under the names that have a meaning here."""
    renamed = dict(metrics)
    for own, names in (("loss", LOSSES), ("accuracy", ACCURACIES)):
        first = next((name for name in names if name in metrics), None)
        if first is not None:
            renamed[own] = renamed.pop(first)
    return renamed
