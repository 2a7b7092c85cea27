# SPDX-License-Identifier: Apache-2.0
"""Which clients' data look wrong, and how: by changes in them, and by comparison with their peers' data.

Limits are log-likelihood ratios and deviations that none of about 13,000 healthy clients of the tuning sets exceeded
(`fedvitals_studies.faultbank`, banks `tune-wide` and `healthy-tune`), except in federations whose clients disagree
about what a class is. There many clients stand out, and none of them is accused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedvitals.data_change import DataChange, DataSketch
from fedvitals.diagnosis.evidence.attendance import clients_of
from fedvitals.diagnosis.evidence.compared_data import DataDeviation, compare_data, has_other_inputs
from fedvitals.diagnosis.evidence.described_data import DataSketches, data_sketches
from fedvitals.diagnosis.evidence.fault_kinds import INPUT_FAULTS
from fedvitals.diagnosis.history_cutoff import shared, state_of
from fedvitals.protocols import History, Node

NOISE_LIMIT, LEAST_RATE = 8.0, 0.2  # of a log-likelihood ratio, and of the share of wrong labels it implies
FLIP_LIMIT, LEAST_SHARE = 13.0, 0.35  # the same, for the samples of one label
FEW_FLIPPED, LEAST_FLIPPED = 8.0, 0.05  # a number of samples that is few, and the share of all that a flip must concern
USUAL_PAIRS = 900  # class pairs times clients, for which the limit is as above
ABOVE_USUAL = 10.0  # by which a flip must exceed those of other clients, since samples may depend on each other
EXPLAINED, MIXED = 0.5, 0.35  # of the deviation of a client's data, the share that wrong labels must explain
SPREAD_LIMIT = 4.5  # deviations of the logarithm of the inputs' standard deviation
SPREAD_OF_FEW = 7.0  # the same for clients with hardly a class to compare
SCALED_OF_FEW = 5.0  # times the usual standard deviation, as below: each may have a series of its own
SCALED, NOISIER = 3.0, 1.1  # times the usual standard deviation: inputs on another scale; noisy inputs
MISSING, MORE_MISSING = 0.05, 3.0  # share of inputs, more than before or than so many times that of any peer
REPEATED = 0.5  # share of samples; a client with more repeated ones than that, and than of any peer as above
FEWEST_PEERS = 3  # with which the next two are compared
UNRELATED, RELATED = 0.2, 0.4  # explained variance of targets as a share of the lowest peer's, and that of each peer
CONSTANT = 0.2  # share of features; the share that do not vary must exceed the peers', or the earlier one, by more
WITHIN = 0.4  # of the variance that noise adds to inputs, the share that must be visible within classes
NEAR_FLIP = 9.6  # a log-likelihood ratio that is unusual, but not enough for an accusation
MANY = 0.3  # of all clients: if more than this stand out, they are another population
GROUP, MOST_OF_GROUP = 2, 0.45  # clients, and share of all, that form a group with inputs of their own
AS_MANY = 0.8  # of the clients now compared, with which data were compared before without being unusual
MOST_COMPARED = 300  # clients; of those not in the round, the ones that reported last


@dataclass(frozen=True, slots=True)
class DataSuspect:
    """A client whose data look wrong.

    The `kind` of fault, and the evidence: a change, or a deviation from the peers.
    """

    kind: str
    since: int
    sketch: DataSketch
    change: DataChange | None = None
    deviation: DataDeviation | None = None

    @property
    def has_unrelated_targets(self) -> bool:
        """Whether it is suspected because its numeric targets do not follow from its inputs, as every peer's do."""
        changed = self.change is not None and self.change.kind != "inputs"
        return self.kind == "label_noise" and self.deviation is None and not changed


@dataclass(frozen=True, slots=True)
class DataExamination:
    """Result for a round's data: suspects, a group with different inputs, and clients with nothing unusual."""

    suspects: Mapping[Node, DataSuspect]
    group: tuple[Node, ...]
    usual: frozenset[Node]
    usual_inputs: frozenset[Node]  # whose inputs spread as the others' do, even if their labels are unknown


class _Compared:
    """The comparison of a history's newest sketches, and the sketches that were not unusual.

    They are compared again when there is a new sketch or other clients take part. Sketches that were not unusual are
    kept with the number of clients that they were compared with.
    """

    def __init__(self) -> None:
        self.key: object = None
        self.deviations: dict[Node, DataDeviation] = {}
        self._usual: dict[Node, tuple[DataSketch, int]] = {}

    def was_usual(self, node: Node, sketch: DataSketch) -> bool:
        """Return whether these same data were not unusual before. If they deviate now, the data of others changed."""
        known, clients = self._usual.get(node, (None, 0))
        return known is sketch and clients >= AS_MANY * len(self.deviations)

    def add_usual(self, node: Node, sketch: DataSketch) -> None:
        """Record that a client's data are not unusual."""
        if not self.was_usual(node, sketch):
            self._usual[node] = sketch, len(self.deviations)


@shared
def examine_data(history: History, round_index: int) -> DataExamination:
    """Return the result for the data of a round's clients."""
    sketches = data_sketches(history, round_index)
    present = [node for node in clients_of(history, round_index) if node in sketches.newest]
    if not present:
        return judge_data(sketches, present, {})
    compared = _compared(history, sketches, present)
    cleared = [node for node in present if compared.was_usual(node, sketches.newest[node])]
    examined = judge_data(sketches, present, compared.deviations, cleared)
    for node in examined.usual:
        compared.add_usual(node, sketches.newest[node])
    return examined


def judge_data(
    sketches: DataSketches,
    present: Sequence[Node],
    deviations: Mapping[Node, DataDeviation],
    cleared: Collection[Node] = (),
) -> DataExamination:
    """Return the result for the data of these clients, from their sketches and deviations from the others'.

    The deviations of `cleared` clients, whose data were not unusual when described, are ignored.
    """
    changes = {node: change for node in present if (change := sketches.change(node)) is not None}
    suspects, shifted = dict[Node, DataSuspect](), list[Node]()
    for node in present:
        deviation = None if node in cleared else deviations.get(node)
        suspect = _suspect(sketches.newest[node], changes.get(node), deviation)
        if suspect is not None and suspect.kind == "inputs":
            shifted.append(node)
        elif suspect is not None:
            suspects[node] = suspect
    known = max(len(deviations), len(present))
    otherwise = {*shifted, *(node for node, own in suspects.items() if own.kind in INPUT_FAULTS)}
    constant = {node for node in otherwise if _is_constant(sketches, node, otherwise, deviations)}
    if len(constant) <= max(1, MANY * known):
        for node in constant:
            suspects[node] = _suspect_of(
                "input_constant", sketches.newest[node], changes.get(node), deviations.get(node)
            )
        shifted = [node for node in shifted if node not in constant]
    missing = [node for node in present if _has_more_missing(sketches, node, deviations)]
    if len(missing) <= max(1, MANY * known):
        for node in missing:
            suspects[node] = _suspect_of(
                "input_missing", sketches.newest[node], changes.get(node), deviations.get(node)
            )
        shifted = [node for node in shifted if node not in missing]
    unlike = _unlike_in_scalars(sketches, [node for node in present if node not in suspects], deviations, known)
    suspects |= {
        node: _suspect_of(kind, sketches.newest[node], changes.get(node), None) for node, kind in unlike.items()
    }
    shifted = [node for node in shifted if node not in unlike]
    many = _another_population(suspects, deviations, known)
    group = tuple(shifted) if GROUP <= len(shifted) <= MOST_OF_GROUP * known and not many else ()
    unusual = {*suspects, *shifted}
    usual = frozenset(node for node in present if node not in unusual and _is_usual(deviations.get(node)))
    inputs = frozenset(
        node for node in present if node in deviations and abs(deviations[node].spread_score) < SPREAD_LIMIT / 2
    )
    accused = {node: own for node, own in suspects.items() if node not in many}
    return DataExamination(accused, group, usual, inputs - unusual)


def _another_population(
    suspects: Mapping[Node, DataSuspect], deviations: Mapping[Node, DataDeviation], clients: int
) -> frozenset[Node]:
    """Return the suspects too many to be faulty: data that changed together, or many that are equally unusual."""
    changed = {node for node, suspect in suspects.items() if suspect.change is not None}
    labels = {node for node, suspect in suspects.items() if suspect.kind.startswith("label")} - changed
    near = sum(
        (own.noise > NOISE_LIMIT / 2 and own.rate > LEAST_RATE / 2)
        or own.flip > max(NEAR_FLIP, own.usual_flip + NEAR_FLIP / 2)
        for own in deviations.values()
    )
    most = max(1, MANY * clients)
    return frozenset((changed if len(changed) > most else set()) | (labels if near > most else set()))


def _compared(history: History, sketches: DataSketches, present: list[Node]) -> _Compared:
    compared = state_of(history, _Compared)
    others = [node for node in sketches.newest if node not in {*present}] if len(present) < MOST_COMPARED else []
    others.sort(key=lambda node: -sketches.newest[node].round)
    nodes = sorted([*present, *others[: max(0, MOST_COMPARED - len(present))]])
    key = (sketches.version, tuple(nodes))
    if compared.key != key:
        compared.key, compared.deviations = key, compare_data({node: sketches.newest[node] for node in nodes})
    return compared


def _is_constant(
    sketches: DataSketches, node: Node, otherwise: Collection[Node], deviations: Mapping[Node, DataDeviation]
) -> bool:
    """Return whether far more features of a client whose inputs look otherwise have one and the same value than of the
    peers, or than of its own before: a dead sensor, a dropped channel, a column that nobody fills.

    Few samples vary in few features: a client with fewer than all of its peers is compared with its own past only.
    """
    own, before = sketches.newest[node], sketches.before(node)
    share = own.scalars.get("constant", 0.0) - CONSTANT
    if before is not None and share > before.scalars.get("constant", 0.0):
        return True
    peers = [sketches.newest[other] for other in deviations if other not in otherwise]
    few = not peers or own.samples < min(peer.samples for peer in peers)
    return not few and share > max(peer.scalars.get("constant", 0.0) for peer in peers)


def _has_more_missing(sketches: DataSketches, node: Node, deviations: Mapping[Node, DataDeviation]) -> bool:
    """Return whether far more inputs of a client are NaN or infinite than before, or than of any peer.

    Its labels are not judged then: the projections of such samples are nearer to each other than they should be.
    """
    own, before, change = sketches.newest[node], sketches.before(node), sketches.change(node)
    share = own.scalars.get("missing", 0.0)
    if share <= MISSING or (change is not None and change.kind.startswith("label")):
        return False
    if before is not None and share > before.scalars.get("missing", 0.0) + MISSING:
        return True
    peers = [sketches.newest[other].scalars.get("missing", 0.0) for other in deviations if other != node]
    return bool(peers) and node in deviations and share > MISSING + MORE_MISSING * max(peers)


def _unlike_in_scalars(
    sketches: DataSketches, nodes: Sequence[Node], deviations: Mapping[Node, DataDeviation], clients: int
) -> dict[Node, str]:
    """Return the clients that stand out by a scalar alone, with the kind of fault; nobody if too many do."""
    unlike: dict[Node, str] = {}
    for kind, stands_out in (("label_noise", _has_unrelated_targets), ("input_repeated", _is_repetitive)):
        found = [node for node in nodes if node in deviations and stands_out(sketches, node, deviations)]
        unlike |= dict.fromkeys(found if len(found) <= max(1, MANY * clients) else (), kind)
    return unlike


def _is_repetitive(sketches: DataSketches, node: Node, deviations: Mapping[Node, DataDeviation]) -> bool:
    """Return whether more than half of a client's samples repeat others of its own, and far fewer of any peer's do."""
    share, peers = _beside_peers(sketches, node, deviations, "duplicates")
    return len(peers) >= FEWEST_PEERS and share > max(REPEATED, MORE_MISSING * max(peers))


def _has_unrelated_targets(sketches: DataSketches, node: Node, deviations: Mapping[Node, DataDeviation]) -> bool:
    """Return whether a client's numeric targets have nothing to do with its inputs, although every peer's have."""
    share, peers = _beside_peers(sketches, node, deviations, "explained")
    return len(peers) >= FEWEST_PEERS and min(peers) > RELATED and share < UNRELATED * min(peers)


def _beside_peers(
    sketches: DataSketches, node: Node, deviations: Mapping[Node, DataDeviation], name: str
) -> tuple[float, list[float]]:
    """Return a scalar of a client, NaN if it was not measured, and those of its peers."""
    known = {other: sketches.newest[other].scalars.get(name, math.nan) for other in {node, *deviations}}
    own = known.pop(node)
    return own, [value for value in known.values() if math.isfinite(value)]


def _suspect_of(
    kind: str, sketch: DataSketch, change: DataChange | None, deviation: DataDeviation | None
) -> DataSuspect:
    since = sketch.round if change is None else change.since
    return DataSuspect(kind, since, sketch, change, deviation)


def _suspect(sketch: DataSketch, change: DataChange | None, deviation: DataDeviation | None) -> DataSuspect | None:
    """Return what is wrong with a client's data; a change is more certain than a deviation."""
    if change is not None and change.kind != "inputs":
        return DataSuspect(change.kind, change.since, sketch, change, deviation)
    kind = None if deviation is None else _kind_of(deviation)
    if kind is None and change is not None:
        kind = "inputs"
    return None if kind is None else _suspect_of(kind, sketch, change, deviation)


def _kind_of(deviation: DataDeviation) -> str | None:
    """Return the kind of fault that best explains a deviation from the peers; None if it is not unusual."""
    if deviation.features:
        return "input_scale"
    ratio = deviation.spread_ratio
    scaled = SCALED if deviation.cells > 1 else SCALED_OF_FEW
    if abs(deviation.spread_score) > SPREAD_LIMIT and not 1 / scaled < ratio < scaled:
        return "input_scale"
    # With inputs of higher contrast, the classes would also lie further apart.
    limit = SPREAD_LIMIT if deviation.cells > 1 else SPREAD_OF_FEW
    # Noise on inputs adds as much to their variance within classes as to their total variance.
    within = not deviation.wider < 1 + WITHIN * (ratio**2 - 1)
    if deviation.spread_score > limit and ratio > NOISIER and within and not deviation.slope > (1 + ratio) / 2:
        return "input_noise"
    explained = max(deviation.mixed, deviation.flip)
    noise = deviation.noise > NOISE_LIMIT and deviation.rate > LEAST_RATE and explained >= MIXED * deviation.excess
    enough = deviation.share > LEAST_SHARE and deviation.flipped_share > LEAST_FLIPPED
    flip = deviation.flip > _flip_limit(deviation) and enough and explained >= EXPLAINED * deviation.excess
    if noise or flip:
        several = (
            deviation.flips > 1 and max(deviation.mixed - deviation.flip, deviation.noise - deviation.flip / 3) > 0
        )
        return "label_noise" if (noise and deviation.mixed > deviation.flip) or several or not flip else "label_flip"
    return "inputs" if has_other_inputs(deviation) else None


def _flip_limit(deviation: DataDeviation) -> float:
    """Return the log-likelihood ratio above which a flip is reported.

    It is higher if many flips are tested, if those of the other clients are higher, and if it concerns few samples,
    whose mean need not be normal.
    """
    limit = max(FLIP_LIMIT + math.log(max(deviation.pairs, 1) / USUAL_PAIRS), deviation.usual_flip + ABOVE_USUAL)
    return limit * max(1.0, FEW_FLIPPED / max(deviation.flipped, 1e-9))


def _is_usual(deviation: DataDeviation | None) -> bool:
    """Return whether a client's data were compared well enough to say that they are not unusual."""
    return (
        deviation is not None and deviation.resolved >= NOISE_LIMIT and abs(deviation.spread_score) < SPREAD_LIMIT / 2
    )
