# SPDX-License-Identifier: Apache-2.0
"""Detects when a client's data are new or have changed, and has them described then (`probes.data_sketch`)."""

from __future__ import annotations

import contextlib
import math
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from fedvitals.data_change import UNCHANGED, OwnData, sketch_from, vanished_labels
from fedvitals.probes import samples
from fedvitals.probes.data_sketch import DIGITS, DataDescription, checksum, describe, first_tensor
from fedvitals.probes.fit import labels_of, labels_tensor

MOST_OF_ARRAYS, MOST_OF_OTHERS = 1024, 128  # samples described: of tensors, and of data that are read one by one
MOST_NUMBERS = 1 << 20  # of tensors, unless that allows fewer samples than for other data; also of those summed
CHECKED = 8  # samples compared to detect a change of the data
CHECK_ROUNDS = 5  # participations between two checks of data that must be read sample by sample
LONGEST_WAIT = 40  # the same if the data differ at each check, as augmented ones do

_Report = tuple[dict[str, float], tuple[str, str, Mapping[str, Any]]]  # metrics; an event's name, message and data


@dataclass(slots=True)
class _KnownData:
    """What is remembered of a client's data (tensors, checksums, description, labels), and when to check again."""

    tensors: tuple[weakref.ref[Tensor], ...] = ()
    versions: tuple[int, ...] = ()
    rows: Sequence[int] | None = None  # of these tensors, where not all are the client's
    checksum: int | None = None  # of tensors
    sums: Mapping[int, int] = field(default_factory=dict)  # checksums by index, of samples read one by one
    total: int = 0  # samples, of which these are
    targets: int | None = None  # checksum of all its labels, where these can be had without its samples
    source: Callable[[], Any] = lambda: None  # the data set that is read one by one, as long as it exists
    seen: int = 0  # participations with this very one
    looks: int = 0  # that found the data unchanged
    wait: int = CHECK_ROUNDS  # participations between two looks
    left: int = 0  # participations until the next look
    own: OwnData = field(default_factory=OwnData)
    labels: Mapping[int, int] = field(default_factory=dict)
    vanished: frozenset[int] = frozenset()


class DataWatch:
    """Detects when the data of a run's clients are new or have changed, and describes them then."""

    def __init__(self) -> None:
        self._known: dict[str, _KnownData] = {}

    def look(self, node: str, data: Any) -> _Report | None:
        """Return metrics, and an event's name, message and data, if a client's data are new; None if they are not.

        Tensors are compared in every round, at almost no cost if they are the same objects, otherwise by all labels, a
        few samples and, unless they are large, the sum of all inputs, which any NaN makes NaN; data that must be read
        sample by sample, only every few participations, and less often the more often they differ.
        """
        known = self._known.setdefault(node, _KnownData())
        arrays = tensors_of(data)
        if arrays is not None:
            return self._look_at_tensors(known, arrays) if len(arrays) else None
        total = samples.size(data)
        replaced = self._is_replaced(known, data) or total != known.total
        if not total or (known.left > 0 and not replaced):
            known.left -= bool(total)
            return None
        unchanged = total == known.total and self._is_as_described(known, data, whole=replaced)
        differs_again = bool(known.sums) and not unchanged and not replaced
        known.wait = min(2 * known.wait, LONGEST_WAIT) if differs_again else CHECK_ROUNDS
        known.left = known.wait - 1
        if unchanged:
            known.looks += 1
            return None
        places = samples.spread_indices(total, MOST_OF_OTHERS, 0)
        batch = samples.read(data, places)
        known.total, known.sums, known.targets = total, _checksums(batch, places), _checksum_of_labels(data)
        return _report(known, describe(*batch, total), labels_of(data))

    @staticmethod
    def _is_replaced(known: _KnownData, data: Any) -> bool:
        """Return whether this is another data set than the one that was there in several participations."""
        source = data.dataset if isinstance(data, DataLoader) else data
        same = known.source() is source
        replaced = not same and known.seen > 1
        known.seen = known.seen + 1 if same else 1
        with contextlib.suppress(TypeError):  # a list cannot be referred to so, and counts as another each time
            known.source = weakref.ref(source)
        return replaced

    @staticmethod
    def _is_as_described(known: _KnownData, data: Any, *, whole: bool) -> bool:
        """Return whether data are the described ones, by all labels if they are at hand and a few samples: others at
        each look, so that what was changed in a few of them is noticed in the end. `whole`: by all of these samples.
        """
        stride = 1 if whole else max(1, len(known.sums) // CHECKED)
        places = [*known.sums][known.looks % stride :: stride][: None if whole else CHECKED]
        sums = _checksums(samples.read(data, places), places)
        return all(known.sums[place] == own for place, own in sums.items()) and (
            known.targets == _checksum_of_labels(data)
        )

    def look_at_all(
        self, nodes: Sequence[str], inputs: Sequence[Tensor], labels: Sequence[Tensor]
    ) -> dict[int, _Report]:
        """Return the reports of `look` for clients that train as one batch, by row, with two copies from the device."""
        picked = [x[torch.as_tensor(samples.spread_indices(len(x), CHECKED, 0), device=x.device)] for x in inputs]
        both = [
            [part.numpy() for part in torch.cat([*own]).cpu().split([len(part) for part in own])]
            for own in (picked, labels)
        ]
        reports = {}
        for row, (node, few, own) in enumerate(zip(nodes, *both, strict=True)):
            known = self._known.setdefault(node, _KnownData())
            if self._is_unchanged(known, zlib.crc32(own.tobytes(), zlib.crc32(few.tobytes()))):
                continue
            report = _report(known, _describe_tensors(_Arrays(inputs[row], labels[row])), labels_of((few, labels[row])))
            if report is not None:
                reports[row] = report
        return reports

    def _look_at_tensors(self, known: _KnownData, own: _Arrays) -> _Report | None:
        arrays = own.x, own.y
        same = len(known.tensors) == 2 and all(ref() is part for ref, part in zip(known.tensors, arrays, strict=True))
        versions = tuple(part._version for part in arrays)  # noqa: SLF001 - counts changes in place
        if same and versions == known.versions and known.rows is own.rows:
            known.looks += 1
            return None
        known.tensors, known.versions, known.rows = tuple(map(weakref.ref, arrays)), versions, own.rows
        few, _ = own.at(samples.spread_indices(len(own), CHECKED, 0))
        labels = own.labels()
        sums = own.x.sum() if own.rows is None and own.x.numel() <= MOST_NUMBERS else few.sum()
        if self._is_unchanged(known, zlib.crc32(checksum(sums).to_bytes(4, "big"), _checksum_of((few, labels)))):
            return None
        return _report(known, _describe_tensors(own), labels_of((few, labels)))

    @staticmethod
    def _is_unchanged(known: _KnownData, checksum: int) -> bool:
        unchanged = known.checksum == checksum
        known.looks += unchanged
        known.checksum = checksum
        return unchanged


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Data that are two tensors, or these rows of them."""

    x: Tensor
    y: Tensor
    rows: Sequence[int] | None = None

    def __len__(self) -> int:
        return samples.size((self.x, self.y)) if self.rows is None else len(self.rows)

    def at(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of these samples."""
        rows = torch.as_tensor(places if self.rows is None else [int(self.rows[place]) for place in places])
        return self.x[rows.to(self.x.device)], self.y[rows.to(self.y.device)]

    def labels(self) -> Tensor:
        """Return all labels."""
        return self.y if self.rows is None else self.y[torch.as_tensor(self.rows, device=self.y.device)]


def tensors_of(data: Any) -> _Arrays | None:
    """Return inputs and labels of data that are two tensors, or rows of these; None of any others."""
    match data:
        case DataLoader():
            return tensors_of(data.dataset)
        case TensorDataset(tensors=(Tensor() as x, Tensor() as y)):
            return _Arrays(x, y)
        case Subset(dataset=TensorDataset(tensors=(Tensor() as x, Tensor() as y)), indices=rows):
            return _Arrays(x, y, rows)
        case (Tensor() as x, Tensor() as y):
            return _Arrays(x, y)
        case (np.ndarray() as x, np.ndarray() as y):
            return _Arrays(torch.as_tensor(x), torch.as_tensor(y))
    return None


def _describe_tensors(own: _Arrays) -> DataDescription | None:
    numbers = len(own) * math.prod(own.x.shape[1:])
    most = min(MOST_OF_ARRAYS, max(MOST_OF_OTHERS, MOST_NUMBERS * len(own) // max(numbers, 1)))
    return describe(*own.at(samples.spread_indices(len(own), most, 0)), len(own))


def _report(
    known: _KnownData, description: DataDescription | None, labels: Mapping[int, int] | None = None
) -> _Report | None:
    """Return the report on new or changed data, with what changed in them.

    `labels`: how many samples each label has, if known.
    """
    looks, known.looks = known.looks, 0
    if description is None:
        return None
    name, text, event = description.remark(looks)
    is_first = known.own.newest is None
    known.own.add(sketch_from(0, event))
    change = known.own.change
    if labels is not None:
        known.vanished = vanished_labels(known.labels, labels, known.vanished)
        known.labels = labels
    if is_first:
        return description.metrics, (name, text, event)
    changes: dict[str, Any] = {"change": UNCHANGED if change is None else change.kind}
    if change is not None and math.isfinite(change.moved):
        changes["moved"] = float(f"{change.moved:.{DIGITS}g}")
    if known.vanished:
        changes["classes_lost"] = len(known.vanished)
    return description.metrics, (name, text, {**event, **changes})


def _checksum_of(batch: samples.Batch) -> int:
    x = first_tensor(batch[0])
    return zlib.crc32(checksum(batch[1]).to_bytes(4, "big"), 0 if x is None else checksum(x))


def _checksums(batch: samples.Batch, places: Sequence[int]) -> dict[int, int]:
    """Return the checksum of each of these samples, by its index."""
    x, y = first_tensor(batch[0]), batch[1]
    return {place: _checksum_of((y[row] if x is None else x[row], y[row])) for row, place in enumerate(places)}


def _checksum_of_labels(data: Any) -> int | None:
    labels = labels_tensor(data)
    return None if labels is None else checksum(labels)
