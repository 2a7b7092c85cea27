# SPDX-License-Identifier: Apache-2.0
"""Packs matrices of layer statistics of one family into blocks of float32 [layers, columns, entries], and back.

Entries come last so that one statistic of one layer is contiguous over all its clients and rounds.
"""

from __future__ import annotations

import functools
import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedvitals.errors import StoreError
from fedvitals.measurements import MeasuredLayers, Measurements, Telemetry
from fedvitals.records import LayerStats, Where, natural
from fedvitals.stats import FAMILIES, Array, derive, pack_entries, unpack

Numbers = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]

NONE = -(2**63)  # for a missing round or step; a symbol that is None is 0, since symbols count from 1

# Little endian on every machine: a store may be moved to another.
_I8, _F8, _I4 = (np.dtype(kind) for kind in ("<i8", "<f8", "<i4"))
_COORDINATES = (("rounds", _I8), ("at", _F8), ("nodes", _I4))
_DETAILS = (("steps", _I8), ("sequences", _I8), ("layers", _I4), ("groups", _I4), ("sources", _I4))
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The coordinates of a block's matrices: arrays of equal length, with names as symbols."""

    rounds: Whole
    at: Array
    nodes: npt.NDArray[np.int32]
    steps: Whole
    sequences: Whole
    layers: npt.NDArray[np.int32]
    groups: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int32]

    def coordinates(self) -> bytes:
        """Return the entries' rounds, times and nodes as bytes, with a checksum."""
        return with_checksum(b"".join([getattr(self, name).astype(kind, copy=False) for name, kind in _COORDINATES]))

    def details(self) -> bytes:
        """Return the other coordinates of the entries as bytes, with a checksum."""
        return with_checksum(b"".join([getattr(self, name).astype(kind, copy=False) for name, kind in _DETAILS]))


def with_checksum(blob: Any) -> bytes:
    """Return the bytes, or those of a contiguous array, followed by their CRC-32."""
    return b"".join((blob, _CHECKSUM.pack(zlib.crc32(blob))))


def merged(parts: Sequence[Numbers]) -> list[memoryview]:
    """Return the numbers of several blocks combined into those of one: a blob with its checksum for each layer."""
    layers, columns, _ = parts[0].shape
    size = columns * sum(part.shape[2] for part in parts)
    blobs = np.empty((layers, 4 * size + _CHECKSUM.size), np.uint8)
    np.concatenate(parts, axis=2, out=blobs[:, : 4 * size].view("<f4").reshape(layers, columns, -1))
    for blob in blobs:
        _CHECKSUM.pack_into(blob, 4 * size, zlib.crc32(blob[: 4 * size]))
    return [blob.data for blob in blobs]


def _verified(blob: bytes, size: int) -> memoryview:
    """Return the bytes without their checksum; StoreError if it does not match. `size`: the expected number of bytes.

    Blobs written by a store version before 5 have no checksum.
    """
    content = memoryview(blob)[:size]
    if len(blob) == size:
        return content
    if len(blob) != size + _CHECKSUM.size or _CHECKSUM.unpack_from(blob, size)[0] != zlib.crc32(content):
        raise StoreError(
            "A block of layer statistics is damaged: its checksum is not that of its bytes. "
            "`fedvitals doctor STORE --mend` removes such blocks."
        )
    return content


def _split(blob: bytes, fields: tuple[tuple[str, np.dtype[Any]], ...], count: int) -> list[Any]:
    content = _verified(blob, count * sum([kind.itemsize for _, kind in fields]))
    arrays, offset = [], 0
    for _, kind in fields:
        arrays.append(np.frombuffer(content, kind, count, offset))
        offset += arrays[-1].nbytes
    return arrays


def coordinates_of(blob: bytes, count: int) -> tuple[Whole, Array, npt.NDArray[np.int32]]:
    """Return the entries' rounds, times and nodes: all that a matrix over rounds and nodes needs."""
    rounds, at, nodes = _split(blob, _COORDINATES, count)
    return rounds, at, nodes


def entries_of(coordinates: bytes, details: bytes, count: int) -> Entries:
    """Read entries from their coordinates and details; `count`: how many there are."""
    return Entries(*_split(coordinates, _COORDINATES, count), *_split(details, _DETAILS, count))


def joined(parts: Sequence[Entries]) -> Entries:
    """Combine the entries of several blocks into one."""
    names = [name for name, _ in (*_COORDINATES, *_DETAILS)]
    return Entries(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


BlockKey = tuple[str, str, str, int, bool, int | None]
"""What the matrices of a block have in common: run, family, layer table, number of layers, whether they are about the
whole federation and not about nodes, and round."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerMatrices:
    """Matrices of one family, layer table and round, [entries, layers, columns]: from one record or from measurements.

    All are about nodes, or all about the whole federation.
    """

    run: str
    family: str
    table: str
    round: int | None
    at: float
    nodes: Sequence[str | None]
    groups: Sequence[str | None]
    step: int | None
    layer: str | None
    source: str
    sequences: Sequence[int]
    values: Array

    @property
    def key(self) -> BlockKey:
        """Return the key of the block of their batch that they belong to."""
        # The whole is separate from the nodes, because its trend over all rounds is read more often than anything else.
        return self.run, self.family, self.table, self.values.shape[1], self.nodes[0] is None, self.round


def layer_matrices(batch: Iterable[Telemetry]) -> Iterator[LayerMatrices]:
    """Yield the matrices of layer statistics among records and measurements."""
    for telemetry in batch:
        if isinstance(telemetry, LayerStats):
            where, values = telemetry.where, np.asarray(telemetry.matrix)[None]
            yield LayerMatrices(
                *(where.run, telemetry.family, telemetry.table, where.round, telemetry.at),
                *((where.node,), (where.group,), where.step, where.layer),
                *(telemetry.source, (telemetry.sequence,), values),
            )
        elif isinstance(telemetry, Measurements):
            for first, part in telemetry.numbered_layers():
                yield from _measured_matrices(telemetry, first, part)


def _measured_matrices(measured: Measurements, first: int, part: MeasuredLayers) -> Iterator[LayerMatrices]:
    """Yield one family's matrices in measurements, those about nodes separate from those about the whole federation."""
    nodes = [measured.nodes[row] for row in part.rows]
    for whole in (False, True) if None in nodes else (False,):
        own = [i for i, node in enumerate(nodes) if (node is None) == whole] if None in nodes else range(len(nodes))
        if own:
            yield LayerMatrices(
                *(measured.run, part.family, part.table, measured.round, measured.at),
                *([nodes[i] for i in own], [measured.groups[part.rows[i]] for i in own], part.step, None),
                *(measured.source, [first + i for i in own]),
                part.matrices if len(own) == len(nodes) else part.matrices[own],
            )


def in_blocks(parts: Iterable[LayerMatrices]) -> Iterator[tuple[BlockKey, list[LayerMatrices]]]:
    """Divide the matrices of a batch, given in order of arrival, into blocks to be stored one after the other.

    Of two matrices for the same place, the one that arrived later is in the same block or in a later one. The layers of
    a family are those of its last block, so that block contains the family's last matrix to arrive.
    """
    blocks: dict[BlockKey, list[LayerMatrices]] = {}
    nodes: dict[
        tuple[str, str, int | None], dict[BlockKey, set[str | None]]
    ] = {}  # these blocks, by the places that they are about
    for part in parts:
        key = part.key
        of_family = nodes.setdefault((part.run, part.family, part.round), {})
        if any(other != key and not own.isdisjoint(part.nodes) for other, own in of_family.items()):
            yield from blocks.items()  # a place has a different layer table than before
            of_family = {}
            blocks, nodes = {}, {(part.run, part.family, part.round): of_family}
        of_family.setdefault(key, set()).update(part.nodes)
        same = blocks.pop(key, [])
        same.append(part)
        blocks[key] = same
    yield from blocks.items()


def block_of(parts: Sequence[LayerMatrices], number: Callable[[str | None], int | None]) -> tuple[Entries, Numbers]:
    """Return matrices of one family and one list of layers as a block."""
    counts = [len(part.nodes) for part in parts]

    def each(values: Sequence[Any], kind: type) -> Any:
        return np.full(counts[0], values[0], kind) if len(parts) == 1 else np.repeat(np.array(values, kind), counts)

    def symbols(names: Sequence[str | None]) -> Any:
        if names.count(None) == len(names):  # usually no groups
            return np.zeros(len(names), np.int32)
        return np.array([number(name) or 0 for name in names], np.int32)

    entries = Entries(
        each([NONE if part.round is None else part.round for part in parts], np.int64),
        each([part.at for part in parts], np.float64),
        symbols([node for part in parts for node in part.nodes]),
        each([NONE if part.step is None else part.step for part in parts], np.int64),
        np.fromiter(itertools.chain.from_iterable(part.sequences for part in parts), np.int64, sum(counts)),
        each([number(part.layer) or 0 for part in parts], np.int32),
        symbols([group for part in parts for group in part.groups]),
        each([number(part.source) or 0 for part in parts], np.int32),
    )
    matrices = parts[0].values if len(parts) == 1 else np.concatenate([part.values for part in parts])
    # What overflows float32 becomes infinity, as it should.
    return entries, pack_entries(parts[0].family, np.asarray(matrices, np.float64))


def layers_in(family: str, blob: bytes, count: int) -> int:
    """Return the number of layers in a blob, judged by its size; 0 if it does not fit this number of entries."""
    layers, rest = divmod(len(blob), 4 * len(FAMILIES[family].columns) * count)
    return layers if rest in (0, _CHECKSUM.size) else 0


def numbers_of(family: str, blob: bytes, count: int) -> Numbers:
    """Return the numbers of a block or of one of its layers, [layers, columns, entries]."""
    columns = len(FAMILIES[family].columns)
    whole = _verified(blob, len(blob) - len(blob) % (4 * columns * count))
    return np.frombuffer(whole, "<f4").reshape(-1, columns, count)


def matrices(family: str, numbers: Numbers) -> Array:
    """Return the original matrices of a block, [entries, layers, columns]."""
    with np.errstate(all="ignore"):
        return unpack(family, numbers.transpose(2, 0, 1))


def statistic_of(family: str, statistic: str, numbers: Numbers) -> Array:
    """Return one statistic of one layer for each entry; `numbers` is [columns, entries]."""
    with np.errstate(all="ignore"):
        return derive(family, unpack(family, numbers.T), statistic)


def records_of(
    key: tuple[str, str, str], entries: Entries, numbers: Numbers, name: Callable[[int], str | None]
) -> list[LayerStats]:
    """Return the records of a block: the inverse of `block_of`; the key is run, family and layer table."""
    run, family, table = key
    records = []
    for i, matrix in enumerate(matrices(family, numbers)):
        rounds, step = int(entries.rounds[i]), int(entries.steps[i])
        where = Where(
            run,
            None if rounds == NONE else rounds,
            name(int(entries.nodes[i])),
            None if step == NONE else step,
            name(int(entries.layers[i])),
            name(int(entries.groups[i])),
        )
        source = name(int(entries.sources[i])) or ""
        records.append(
            LayerStats(where, float(entries.at[i]), family, matrix, table, source, int(entries.sequences[i]))
        )
    return records


_sort_key = functools.lru_cache(maxsize=1 << 14)(natural)  # clients return


@functools.lru_cache(maxsize=64)
def in_natural_order(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names sorted, c2 before c10. A round needs the same few sets of names again and again."""
    return tuple(sorted(names, key=_sort_key))


Part = tuple[Whole, Array, npt.NDArray[np.int32], Array]
"""Rounds, times, nodes and values of some entries."""


def newest(parts: Sequence[Part]) -> Part:
    """Combine the parts, ordered so that of two entries for the same place the newer comes later in the arrays.

    Newer means measured later or, at equal times, arrived later, which is the order of the parts.
    """
    rounds, at, nodes, values = (np.concatenate([part[i] for part in parts]) for i in range(4))
    placed = (rounds != NONE) & (nodes != 0)
    if not placed.all():
        rounds, at, nodes, values = rounds[placed], at[placed], nodes[placed], values[placed]
    if np.any(at[1:] < at[:-1]):
        order = np.argsort(at, kind="stable")
        rounds, at, nodes, values = rounds[order], at[order], nodes[order], values[order]
    return rounds, at, nodes, values


def _index(values: Any) -> tuple[list[int], Any]:
    """Return the distinct values, ascending, and each value's index among them; without sorting if they are dense."""
    low, high = int(values.min()), int(values.max())
    if high - low > 4 * len(values) + 1024:
        distinct, places = np.unique(values, return_inverse=True)
        return distinct.tolist(), places
    present = np.zeros(high - low + 1, bool)
    present[values - low] = True
    places = np.cumsum(present)[values - low] - 1
    return (np.flatnonzero(present) + low).tolist(), places


def over_rounds(
    parts: Sequence[Part], names: Callable[[Iterable[int]], list[str]]
) -> tuple[list[int], list[str], npt.NDArray[np.float64]]:
    """Return one layer's values as [rounds × nodes]; NaN where a node took no part."""
    rounds, _, nodes, values = newest(parts) if parts else (np.empty(0),) * 4
    if not len(rounds):
        return [], [], np.empty((0, 0))
    distinct, row = _index(rounds)
    symbols, column = _index(nodes.astype(np.int64))
    labels = names(symbols)
    order = sorted(range(len(labels)), key=lambda i: natural(labels[i]))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    table = np.full((len(distinct), len(labels)), np.nan)
    table[row, place[column]] = values  # an index that occurs twice keeps its last value
    return distinct, [labels[i] for i in order], table


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """A block's content for one round: layers by name, and the time, node and numbers of each entry."""

    layers: tuple[str, ...]
    at: Array
    nodes: npt.NDArray[np.int32]
    numbers: Numbers


def slice_of(layers: tuple[str, ...], round_: int, entries: Entries, numbers: Numbers) -> Slice:
    """Return the entries of a round that are about a node and its whole round, not about a single step."""
    wanted = np.flatnonzero((entries.rounds == round_) & (entries.nodes != 0) & (entries.steps == NONE))
    chosen: Any = wanted
    if len(wanted) and wanted[-1] - wanted[0] + 1 == len(wanted):  # contiguous, as a rule: no copy is needed
        chosen = slice(wanted[0], wanted[-1] + 1)
    return Slice(layers, entries.at[chosen], entries.nodes[chosen], numbers[..., chosen])


def over_nodes(
    family: str,
    statistics: Sequence[str],
    layers: tuple[str, ...],
    slices: Sequence[Slice],
    names: Callable[[Iterable[int]], list[str]],
) -> tuple[list[str], Array]:
    """Return one round as [nodes × layers × statistics] from slices in order of arrival; NaN for a missing layer."""
    slices = [part for part in slices if len(part.at) and part.layers]  # a table that has not arrived has no layers yet
    if not slices:
        return [], np.empty((0, len(layers), len(statistics)))
    at, nodes = (np.concatenate([getattr(part, name) for part in slices]) for name in ("at", "nodes"))
    groups = [*_alike(slices)]
    if len(groups) == 1 and groups[0][0] == layers and len(groups[0][1]) == len(layers):
        values = _statistics(family, statistics, groups[0][1])
    else:
        values = _placed(family, statistics, layers, groups)
    symbols, column = _index(nodes.astype(np.int64))
    labels = names(symbols)
    ordered = in_natural_order(tuple(labels))
    place = {label: i for i, label in enumerate(ordered)}
    owners = np.array([place[label] for label in labels])[column]
    if len(symbols) == len(owners) and np.array_equal(owners, np.arange(len(owners))):  # usually each once, in order
        return list(ordered), values
    order = np.argsort(at, kind="stable")
    by_node = np.full((len(symbols), *values.shape[1:]), np.nan)
    by_node[owners[order]] = values[order]  # the newest entry of a node that occurs twice
    return list(ordered), by_node


def _statistics(family: str, statistics: Sequence[str], numbers: Numbers) -> Array:
    """Return the statistics of all layers of a block, [entries × layers × statistics]."""
    rows = matrices(family, numbers)
    if tuple(statistics) == FAMILIES[family].columns:
        return rows
    values = np.empty((*rows.shape[:2], len(statistics)))
    with np.errstate(all="ignore"):
        for column, statistic in enumerate(statistics):
            values[..., column] = derive(family, rows, statistic)
    return values


def _placed(
    family: str, statistics: Sequence[str], layers: tuple[str, ...], groups: Sequence[tuple[tuple[str, ...], Numbers]]
) -> Array:
    """The same for groups of slices with different layers, placed by `layers`; NaN where one is missing."""
    values = np.full((sum(numbers.shape[2] for _, numbers in groups), len(layers), len(statistics)), np.nan)
    first = 0
    for same, numbers in groups:
        last = first + numbers.shape[2]
        places = {name: i for i, name in enumerate(same) if i < len(numbers)}
        known = [i for i, name in enumerate(layers) if name in places]
        values[first:last, known] = _statistics(family, statistics, numbers[[places[layers[i]] for i in known]])
        first = last
    return values


def _alike(slices: Sequence[Slice]) -> Iterator[tuple[tuple[str, ...], Numbers]]:
    """Combine neighbours with equal layers: a batch may hold a single client, and calls cost more than its numbers."""
    first = 0
    while first < len(slices):
        last = first + 1
        kind = slices[first].layers, len(slices[first].numbers)
        while last < len(slices) and (slices[last].layers, len(slices[last].numbers)) == kind:
            last += 1
        parts = [part.numbers for part in slices[first:last]]
        yield kind[0], parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
        first = last
