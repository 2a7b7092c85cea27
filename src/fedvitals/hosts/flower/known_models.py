# SPDX-License-Identifier: Apache-2.0
"""The models in a round's messages, each read once, because most messages contain the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, RecordDict

from fedvitals.hosts.array_models import ArrayOutline, ReusableVectors, Values, new_outline
from fedvitals.hosts.flower.arrays import read_arrays, trained_of
from fedvitals.hosts.flower.message_forms import ReplyForm, form_of

if TYPE_CHECKING:
    from fedvitals.hosts.outline import Outline


class KnownModels:
    """The models of the open round. `newest`: its aggregate, once known."""

    def __init__(self, layers: Sequence[str] | None) -> None:
        self._layers = layers
        self._read: dict[tuple[int, ...], tuple[ArrayRecord, dict[str, Values], ReplyForm]] = {}
        self._outline: Outline | ArrayOutline | None = None
        self._loaded: dict[str, Values] | None = None  # the values currently in the outline
        self.started: ArrayRecord | None = None  # the model that the open round began with
        self.newest: ArrayRecord | None = None
        self.spare = ReusableVectors()

    def forget(self) -> None:
        """Forget all models except the newest, which the next round begins with."""
        self._read = {key: known for key, known in self._read.items() if known[0] is self.newest}
        self.started = self.newest = None

    def values(self, record: ArrayRecord) -> dict[str, Values]:
        """Return a model's trained arrays."""
        return self._known(record)[1]

    def form(self, record: ArrayRecord | None) -> ReplyForm:
        """Return the form of a model's arrays."""
        return ReplyForm(None) if record is None else self._known(record)[2]

    def _known(self, record: ArrayRecord) -> tuple[ArrayRecord, dict[str, Values], ReplyForm]:
        """Return what is known of a model, cached by address.

        The record is held as long, so that no other can get its address.
        """
        key = tuple(id(array.data) for array in record.values())
        if key not in self._read:
            read = read_arrays(record)
            self._read[key] = record, trained_of(read, self._layers), form_of(RecordDict(), read)
        return self._read[key]

    def outline(self, record: ArrayRecord) -> Outline | ArrayOutline | None:
        """Return the outline of a model, with its values loaded.

        None if it has no recognisable weights, such as trees sent as bytes.
        """
        values = self.values(record)
        if not values:
            return None
        if self._outline is None or not self._outline.fits(values):
            self._outline = new_outline(values)
        elif values is not self._loaded:  # a round usually begins with the model that the previous one ended with
            self._outline.load(values)
        self._loaded = values
        return self._outline
