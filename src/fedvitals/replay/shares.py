# SPDX-License-Identifier: Apache-2.0
"""Shares such as the accuracy, in the words of all front ends: «71.6 %», and «+3.5 points» for a difference."""

from __future__ import annotations

import math

from fedvitals.catalog import CATALOG


class Share(float):
    """A share between 0 and 1."""

    def __str__(self) -> str:
        return "NaN" if math.isnan(self) else f"{100 * self:.3g} %"


class Points(float):
    """A difference between two shares."""

    def __str__(self) -> str:
        return "NaN" if math.isnan(self) else f"{100 * self:+.3g} points"


def is_share(name: str) -> bool:
    """Return whether the metric of this name lies between 0 and 1."""
    return name in CATALOG and CATALOG[name].unit == "share"


def metric_cell(name: str, value: float | None) -> float | None:
    """Return a metric's value for a table."""
    return Share(value) if value is not None and is_share(name) else value


def metric_in_words(name: str, value: float | None) -> str:
    """Return a metric's value as per cent if it is a share, else with four digits."""
    if value is None:
        return "–"
    return str(Share(value)) if math.isnan(value) or is_share(name) else f"{value:.4g}"
