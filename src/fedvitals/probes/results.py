# SPDX-License-Identifier: Apache-2.0
"""The results of measuring, before they become records: names and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedvitals.stats import Array

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Results:
    """Metrics (name, value, step), matrices (family, values, step), remarks (name, message, data).

    `clients` is the number of clients that the results are a sum of, or None. `tables` gives, for «parameter»,
    «buffer», «module» and «model», the layer table that rows of matrices belong to.
    """

    metrics: list[tuple[str, float, int | None]] = field(default_factory=list)
    matrices: list[tuple[str, Array, int | None]] = field(default_factory=list)
    remarks: list[tuple[str, str, Mapping[str, Any]]] = field(default_factory=list)
    sketch: Tensor | None = None
    clients: int | None = None
    tables: Mapping[str, str] = field(default_factory=dict)

    def take(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add metrics, optionally of one step."""
        self.metrics += [(name, float(value), step) for name, value in metrics.items()]
