# SPDX-License-Identifier: Apache-2.0
"""Learning by heart: the same model on the samples it was trained with and on those kept back, client by client.

A client's `fit.loss_before` and its `local.loss` of the round before are of one and the same global model. Taken in
pairs, what clients differ by cancels; what is left is the gap between known and unknown samples.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedvitals.diagnosis.detectors.signals import middle
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import History
from fedvitals.records import Finding
from fedvitals.stats import Array

KNOWN = 0.85  # loss on known samples against unknown ones
SURE = 2.2  # standard errors of the gap, in each of two rounds
BY_HEART = 0.4  # what training leaves of the loss on own samples
STEPS_PER_SAMPLE = 2.0  # each sample is then seen twice per sample of a batch, in one round
FEWEST = 5  # pairs
LOOK_BACK = 12  # rounds; the fit is measured when time allows


def overfitting(history: History, now: int) -> Iterator[Finding]:
    """In the last two rounds where it was measured, the newest of them this one."""
    steps, samples = middle(history, "steps", now), middle(history, "samples", now)
    if not samples > 0 or not steps / samples >= STEPS_PER_SAMPLE:
        return
    gap = _gap(history, now)
    if gap is None or not _by_heart(gap):
        return
    before = next((g for n in range(now - 1, max(now - LOOK_BACK, 0), -1) if (g := _gap(history, n)) is not None), None)
    if before is None or not _by_heart(before):
        return
    known, unknown, trained = gap.mean(axis=0)
    yield finding(
        "OVERFITTING",
        now,
        f"Clients learn by heart: the global model has a loss of {known:.3g} on samples that it was trained with and "
        f"{unknown:.3g} on others; local training, {steps / samples:.2g} steps per sample, takes it to {trained:.2g}.",
        confidence=0.85,
        numbers=[
            Number("fit.loss_before", float(known), float(unknown), of="local.loss of the same model"),
            Number("fit.loss_after", float(trained), float(known), of="own past"),
            Number("steps per sample", steps / samples, STEPS_PER_SAMPLE, of="limit"),
        ],
    )


def _gap(history: History, number: int) -> Array | None:
    """[clients, 3]: loss on known samples, on unknown ones, and on the known after local training."""
    known, trained = history.latest("fit.loss_before", number), history.latest("fit.loss_after", number)
    unknown = history.latest("local.loss", number - 1)
    pairs = [(known[n], unknown[n], trained[n]) for n in known if n in unknown and n in trained]
    table = np.array(pairs, dtype=np.float64)
    return table if len(pairs) >= FEWEST and np.isfinite(table).all() else None


def _by_heart(gap: Array) -> bool:
    known, unknown, trained = gap.mean(axis=0)
    difference = gap[:, 1] - gap[:, 0]
    error = float(difference.std(ddof=1)) / len(gap) ** 0.5
    return bool(known < KNOWN * unknown and trained < BY_HEART * known and difference.mean() > SURE * error)
