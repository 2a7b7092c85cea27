# SPDX-License-Identifier: Apache-2.0
"""NVFlare's filters that change or hide what a site sends: which of them hide single sites, and their names.

A server learns of them from the job's own configuration, and from the history that NVFlare keeps in each result. A
history is a site's claim: it only counts if most sites say the same, so that no minority can silence the detectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

ENCRYPTING = {"HEModelEncryptor": "homomorphic encryption"}
NOISING = {
    "SVTPrivacy": "differential privacy by the sparse vector technique",
    "PercentilePrivacy": "only the largest changes, clipped",
}
HOLDING_BACK = {"ExcludeVars": "some layers are held back", "DXOBlocker": "some kinds of data are held back"}
COMPRESSING = {"ModelQuantizer": "quantised", "ConvertWeights": "converted between weights and differences"}
KNOWN = {**ENCRYPTING, **NOISING, **HOLDING_BACK, **COMPRESSING}
HIDING = frozenset((*ENCRYPTING, *NOISING, *HOLDING_BACK))  # with these, telemetry would reveal what they keep back
EXACT = frozenset(("ConvertWeights",))  # changes the form of an update but not its content
LEVEL = 1  # the most that may be reported of a site with a hiding filter: sums over many
LARGEST_HISTORY = 20  # filters of a result that are read


def names_of(filters: Iterable[Any]) -> list[str]:
    """Return the class names of filters, without our own."""
    names = [type(entry).__name__ for entry in filters]
    return [name for name in names if name not in ("ServerWatch", "SiteWatch")]


def hiding(names: Iterable[str]) -> list[str]:
    """Return the filters that hide what a site's telemetry would reveal."""
    return [name for name in names if name in HIDING]


def encrypting(names: Iterable[str]) -> list[str]:
    """Return the filters that hide a single site's update from the server itself."""
    return [name for name in names if name in ENCRYPTING]


def described(names: Iterable[str]) -> str:
    """Return the filters that change updates, in words; empty if there are none."""
    known = dict.fromkeys(name for name in names if name in KNOWN and name not in EXACT)
    return "; ".join(f"{name}: {KNOWN[name]}" for name in known)


def statement(names: Iterable[str]) -> dict[str, Any]:
    """Return the data of the event `updates.transformed`; empty if the updates arrive as they were trained."""
    listed = [*names]
    words = described(listed)
    if not words:
        return {}
    encrypted = [ENCRYPTING[name] for name in listed if name in ENCRYPTING]
    return {"stated": words} | ({"secure_aggregation": encrypted[0]} if encrypted else {})


def history_of(meta: Mapping[str, Any]) -> list[str]:
    """Return the filters that a result claims to have passed, as far as they are known."""
    history = meta.get("filter_history")
    if not isinstance(history, list | tuple):
        return []
    return [name for name in history[:LARGEST_HISTORY] if isinstance(name, str) and name in KNOWN]
