# SPDX-License-Identifier: Apache-2.0
"""Learning by heart: the same model on the samples it was trained with and on those kept back, client by client.

A client's `fit.loss_before` and its `local.loss` of the round before are of one and the same global model. Taken in
pairs, what clients differ by cancels; what is left is the gap between known and unknown samples.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedvitals.diagnosis.detectors.signals import client_median
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


def overfitting(history: History, round_index: int) -> Iterator[Finding]:
    """In the last two rounds where it was measured, the newest of them this one."""
    steps, samples = client_median(history, "steps", round_index), client_median(history, "samples", round_index)
    if not samples > 0 or not steps / samples >= STEPS_PER_SAMPLE:
        return
    gap = _loss_table(history, round_index)
    if gap is None or not _is_overfitted(gap):
        return
    before = next(
        (
            g
            for n in range(round_index - 1, max(round_index - LOOK_BACK, 0), -1)
            if (g := _loss_table(history, n)) is not None
        ),
        None,
    )
    if before is None or not _is_overfitted(before):
        return
    known, unknown, trained = gap.mean(axis=0)
    yield finding(
        "OVERFITTING",
        round_index,
        f"Clients learn by heart: the global model has a loss of {known:.3g} on samples that it was trained with and "
        f"{unknown:.3g} on others; local training, {steps / samples:.2g} steps per sample, takes it to {trained:.2g}.",
        confidence=0.85,
        numbers=[
            Number("fit.loss_before", float(known), float(unknown), of="local.loss of the same model"),
            Number("fit.loss_after", float(trained), float(known), of="own past"),
            Number("steps per sample", steps / samples, STEPS_PER_SAMPLE, of="limit"),
        ],
    )


def _loss_table(history: History, round_index: int) -> Array | None:
    """[clients, 3]: loss on known samples, on unknown ones, and on the known after local training."""
    known, trained = history.latest("fit.loss_before", round_index), history.latest("fit.loss_after", round_index)
    unknown = history.latest("local.loss", round_index - 1)
    pairs = [(known[n], unknown[n], trained[n]) for n in known if n in unknown and n in trained]
    table = np.array(pairs, dtype=np.float64)
    return table if len(pairs) >= FEWEST and np.isfinite(table).all() else None


def _is_overfitted(gap: Array) -> bool:
    known, unknown, trained = gap.mean(axis=0)
    difference = gap[:, 1] - gap[:, 0]
    error = float(difference.std(ddof=1)) / len(gap) ** 0.5
    return bool(known < KNOWN * unknown and trained < BY_HEART * known and difference.mean() > SURE * error)
