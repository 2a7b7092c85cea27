# SPDX-License-Identifier: Apache-2.0
"""Exact tests that an update must pass before it is averaged, on the nine sums that are computed anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fedvitals.stats import COUNT, INFS, NANS, SUM_SQUARES, Array


class UnusableUpdateCheck:
    """Checks updates; only remembers which layer sizes are usual."""

    def __init__(self) -> None:
        self._sizes: Counter[tuple[int, ...]] = Counter()

    def __call__(self, rows: Array) -> Iterator[tuple[str, str]]:
        """Yield the first reason why an update, [layers × nine sums], is unusable: the issue, and a sentence."""
        sizes = tuple(rows[:, COUNT].astype(int).tolist())
        usual = self._sizes.most_common(1)
        self._sizes[sizes] += 1
        broken = int(rows[:, NANS].sum() + rows[:, INFS].sum())
        if usual and usual[0][0] != sizes and self._sizes[sizes] < usual[0][1]:
            yield "SHAPE_OR_DTYPE_MISMATCH", f"Layers of {list(sizes)} values, where others have {list(usual[0][0])}."
        elif broken:
            yield "NAN_UPDATE", f"{broken} of its {int(rows[:, COUNT].sum())} values are NaN or infinite."
        elif not rows[:, SUM_SQUARES].any():
            yield "FREE_RIDER", "The update is exactly zero: nothing was trained."
