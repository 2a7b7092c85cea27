# SPDX-License-Identifier: Apache-2.0
"""The form of a reply: its arrays and metrics with their shapes, without their values.

Flower's strategies need replies of one form: the same layers, shapes and metrics in all of them. Lengths of byte arrays
are ignored, because models sent as bytes (trees of XGBoost) differ in length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedvitals.hosts.array_models import Values
from fedvitals.records import printable

UNREADABLE, BYTES = "unreadable", "bytes"
NAMES_IN_SENTENCE = 3
SENTENCE = 500  # characters of a reason


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """The form of a message.

    `arrays`: the form of each array by name; None if there is not exactly one model. `entries`: the names of the
    records of arrays and of all metrics, each with its length if it is a list. `models`: the number of models.
    """

    arrays: frozenset[tuple[str, str]] | None
    entries: frozenset[tuple[str, int | None]] = frozenset()
    models: int = 1

    @property
    def unreadable(self) -> list[str]:
        """Return the names of the arrays that cannot be read."""
        return sorted(name for name, form in self.arrays or () if form == UNREADABLE)


def form_of(content: RecordDict, arrays: Mapping[str, Values | None] | None) -> ReplyForm:
    """Return the form of a message's content.

    `arrays`: its model's arrays as read, None for unreadable ones; None if there is not exactly one model.
    """
    entries: set[tuple[str, int | None]] = set()
    models = 0
    for key, record in content.items():
        if isinstance(record, ArrayRecord):
            models += 1
            entries.add((key, None))
        elif isinstance(record, MetricRecord):
            entries |= {(f"{key}/{name}", len(v) if isinstance(v, list) else None) for name, v in record.items()}
    forms = None if arrays is None else frozenset((name, _form_of_array(array)) for name, array in arrays.items())
    return ReplyForm(forms, frozenset(entries), models)


def _form_of_array(array: Values | None) -> str:
    if array is None:
        return UNREADABLE
    if array.dtype == np.uint8 and array.ndim == 1:
        return BYTES
    kind = "" if np.issubdtype(array.dtype, np.floating) else f" of type {array.dtype.name}"
    return f"shape {array.shape}{kind}"


def array_misfit(form: ReplyForm, usual: ReplyForm) -> str:
    """Return how a reply's arrays differ from the usual ones, as part of a sentence."""
    if form.arrays is None:
        return f"it holds {form.models} models, where others have one" if form.models else "it holds no model"
    if form.unreadable:
        return f"{_listed(form.unreadable)} cannot be read"
    own, others = dict(form.arrays), dict(usual.arrays or ())
    missing = sorted(others.keys() - own.keys())
    if missing:
        return f"it lacks {_listed(missing)}"
    changed = sorted(name for name in others if own[name] != others[name])
    if changed:
        first = changed[0]
        more = f", and {len(changed) - 1} more layers differ" if len(changed) > 1 else ""
        return f"{printable(first)} has {own[first]}, where {others[first]} is usual{more}"[:SENTENCE]
    return f"it has {len(own) - len(others)} layers that the others do not have"


def entry_misfit(form: ReplyForm, usual: ReplyForm) -> str:
    """Return how a reply's metrics and record names differ from the usual ones, as part of a sentence."""
    own, others = dict(form.entries), dict(usual.entries)
    missing = sorted(others.keys() - own.keys())
    if missing:
        return f"it lacks {_listed(missing)}"
    extra = own.keys() - others.keys()
    if extra:
        return f"it has {len(extra)} metrics that the others do not have"
    return f"its lists of {_listed(sorted(name for name in others if own[name] != others[name]))} have other lengths"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_IN_SENTENCE} more" if len(names) > NAMES_IN_SENTENCE else ""
    return printable(", ".join(names[:NAMES_IN_SENTENCE]) + more)[:SENTENCE]
