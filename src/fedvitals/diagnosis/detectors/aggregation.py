# SPDX-License-Identifier: Apache-2.0
"""Detectors of aggregation problems: exploding weights, a client that dominates, clients the model does not serve.

Clients differ by nature, in size and in data. «Dominant» and «left behind» therefore mean more than the usual
differences of this cohort: a gap that no healthy partition shows, or a sudden change against the client's own past.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fedvitals.diagnosis.detectors.signals import client_median, loss_curve
from fedvitals.diagnosis.evidence.attendance import SERVER, clients_of, newest_values, rounds_until
from fedvitals.diagnosis.evidence.described_data import data_sketches
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect
from fedvitals.stats import Array

GROWTH, GROWTHS = 1.25, 4  # factor of the global norm from round to round, and how many in a row
GROWN = 4.0  # times the norm before these rounds

LARGE_GAP = 3.0  # times the next smaller claim; healthy partitions show up to 2
LARGE = 5.0  # times the median
JUMP = 5.0  # times the client's own first claim
REPEATED = 0.5  # share of repeated samples, above which a client's size overstates its information
FEW_KNOWN = 5  # claims below which no client counts as «large»

LASTING = 3  # consecutive participations before clients count as left behind
FAR = 4.0  # robust standard deviations
BEHIND = 0.08  # of the median loss: less does no harm
LOW_LOSS = 0.1  # nats: below, relative differences mean nothing
ALIKE = 0.05  # median distance of the clients' losses from their median, up to which clients hold similar data
UNLIKE = 0.2  # above which clients have little in common
HARMFUL = 0.1  # of the first loss, by which the model must serve a group worse: a converged model has hardly any loss
LEAST_GROUP, MOST_GROUP = 2, 0.4  # clients; share of the cohort
CHANGES, BEFORE = (3, 5, 8), 4  # participations examined since a change, and before it
FEWER_CLASSES = 0.2  # nats of the labels' entropy
FAIR_SHARE = 0.12  # of the cohort, which must have changed together
# Robust standard deviations, by how many clients must have changed.
RISEN, RISEN_MANY, RISEN_UNLIKE = ({2: 9.0, 3: 5.5}, 3.8, 8.0)

WIDE, WIDE_LAYERS = 30.0, 0.5  # times the peers' running variance, in at least this share of the layers
BUFFER_SIGNS = ("min", "max", "nans", "infs")
INHERITED = 10  # rounds that an update may have been in transit since its client was sent a broken model


def weight_explosion(history: History, round_index: int) -> Iterator[Finding]:
    """WEIGHT_EXPLOSION: the norm of the global weights grows by a factor, round after round."""
    norms = newest_values(history.series("weight.norm", SERVER), round_index, GROWTHS + 1)
    values = np.array([value for _, value in norms])
    if len(values) <= GROWTHS or not (values > 0).all() or not np.isfinite(values).all():
        return
    factors = values[1:] / values[:-1]
    if factors.min() > GROWTH and values[-1] > GROWN * values[0] and not _loss_fell(history, norms[0][0], round_index):
        text = f"The norm of the global weights grew {values[-1] / values[0]:.3g} times in {GROWTHS} rounds."
        number = Number("weight.norm", float(values[-1]), float(values[0]), of="own past")
        since = norms[0][0]
        yield finding("WEIGHT_EXPLOSION", round_index, text, confidence=0.97, since=since, numbers=[number])


def _loss_fell(history: History, since: int, round_index: int) -> bool:
    """Return whether the loss fell meanwhile: weights that began too small may grow fast without harm.

    If the host logs none, the median loss of the clients on their own samples is used.
    """
    curve = loss_curve(history, round_index)
    losses = [value for past_round, value in zip(curve.rounds, curve.values, strict=True) if past_round >= since]
    if len(losses) < 2:
        rounds = [past_round for past_round in rounds_until(history, round_index) if past_round >= since]
        losses = [client_median(history, "fit.loss_before", past_round) for past_round in rounds]
        losses = [value for value in losses if not math.isnan(value)]
    return len(losses) > 1 and bool(losses[-1] < losses[0])


def dominant_clients(history: History, round_index: int) -> Iterator[Finding]:
    """DOMINANT_CLIENT: a client whose true number of samples outweighs the others by far more than usual.

    If the number is not that of its data, WRONG_SAMPLE_COUNT is reported instead. It is a note if the client's data are
    known to be that many, since sizes often differ widely; unless they became that many within the run, or most of them
    are repeated.
    """
    claims = history.latest("update.samples", round_index)
    if not claims or max(claims.values()) <= LARGE * max(min(claims.values()), 1.0):
        return
    known: dict[Node, float] = {}
    for past_round in rounds_until(history, round_index):
        known |= history.latest("update.samples", past_round)
    if len(known) < FEW_KNOWN or not any(known.values()):
        return
    sizes = history.latest("samples", round_index)
    median, large = float(np.median([*known.values()])), _above_the_gap(known)
    total, repeated = sum(claims.values()), _repeated_samples(history, round_index)
    for node, claim in claims.items():
        first = history.series("update.samples", node)[1][:1]
        grown = bool(first) and claim > JUMP * first[0]
        honest = node in sizes and sizes[node] == claim
        if claim > LARGE * median and (node in large or grown) and (honest or not grown):
            share = f"{100 * claim / total:.0f} % of this round's weight"
            text = f"{node} has {claim:.0f} samples, {share}; the median client has {median:.0f}."
            text += f" {100 * repeated[node]:.0f} % of them are repeated." if node in repeated else ""
            usual = honest and not grown and node not in repeated
            size, severity = Number("update.samples", claim, median), "note" if usual else "warning"
            yield finding(
                "DOMINANT_CLIENT", round_index, text, confidence=0.95, node=node, severity=severity, numbers=[size]
            )


def _repeated_samples(history: History, round_index: int) -> dict[Node, float]:
    """Return the share of repeated samples of clients whose data mostly repeat, unless many others' do too."""
    newest = data_sketches(history, round_index).newest
    shares = {node: sketch.scalars.get("duplicates", 0.0) for node, sketch in newest.items()}
    usual = float(np.median([*shares.values()])) if shares else 0.0
    return {node: share for node, share in shares.items() if share > REPEATED > 2 * usual}


def _above_the_gap(known: Mapping[Node, float]) -> set[Node]:
    """Return the few largest clients above a gap in size that no healthy partition shows."""
    order = sorted(known, key=lambda node: -known[node])
    for place in range(min(len(order) // 3, len(order) - 1), 0, -1):
        if known[order[place - 1]] > LARGE_GAP * max(known[order[place]], 1.0):
            return set(order[:place])
    return set()


def group_left_behind(history: History, round_index: int) -> Iterator[Finding]:
    """GROUP_LEFT_BEHIND: several clients whose own samples the global model fits persistently far worse.

    They differ either from all others, if these are alike, or since a sudden change that the others do not show.
    """
    now = _excess(history, round_index)
    if sum(off > BEHIND for off, _ in now.values()) < LEAST_GROUP:
        return
    excesses: dict[Node, list[tuple[float, float]]] = {node: [] for node in now}
    for past_round in rounds_until(history, round_index):
        for node, value in _excess(history, past_round).items():
            excesses.setdefault(node, []).append(value)
    excess_by_client = {node: excesses[node] for node in now}
    changed = next((group for lasting in CHANGES if (group := _clients_risen(excess_by_client, lasting))), {})
    left_behind = changed or _clients_apart(excess_by_client)
    if not LEAST_GROUP <= len(left_behind) <= MOST_GROUP * len(now):
        return
    losses = history.latest("fit.loss_before", round_index)
    usual = float(np.median([value for node, value in losses.items() if node not in left_behind]))
    theirs = float(np.median([losses[node] for node in left_behind]))
    if theirs - usual < HARMFUL * _first_loss(history):
        return
    names = sorted(left_behind, key=lambda node: -left_behind[node])
    shown = ", ".join(names[:8]) + (" and others" if len(names) > 8 else "")
    how = "since a sudden change" if changed else "round after round"
    fit = f"loss {theirs:.2f} on their samples, {usual:.2f} on the others'"
    loss = Number("fit.loss_before", theirs, usual, float(np.median([*left_behind.values()])))
    yield finding(
        "GROUP_LEFT_BEHIND",
        round_index,
        f"The global model serves {shown} worse, {how}: {fit}.",
        confidence=0.9,
        severity=None if changed or not _of_few_classes(history, left_behind, now) else "note",
        numbers=[loss],
        suspects=[Suspect(node, 1.0, "badly served") for node in names],
    )


def _first_loss(history: History) -> float:
    """Return the median client's loss when it was first measured."""
    for past_round in history.rounds():
        losses = [value for value in history.latest("fit.loss_before", past_round).values() if math.isfinite(value)]
        if losses:
            return float(np.median(losses))
    return 0.0


def _of_few_classes(history: History, group: Mapping[Node, float], cohort: Iterable[Node]) -> bool:
    """Return whether the group's labels are more one-sided than the others', so that non-IID data explain it."""
    entropies = {node: history.series("label.entropy", node)[1][-1:] for node in cohort}
    inside = [entropies[node][0] for node in group if entropies[node]]
    outside = [value[0] for node, value in entropies.items() if value and node not in group]
    return bool(inside and outside) and float(np.median(inside)) < float(np.median(outside)) - FEWER_CLASSES


@shared
def _excess(history: History, round_index: int) -> dict[Node, tuple[float, float]]:
    """Return how far above the median each loss on the received model is: relatively, and in robust deviations."""
    losses = {
        node: value for node, value in history.latest("fit.loss_before", round_index).items() if math.isfinite(value)
    }
    if len(losses) < FEW_KNOWN:
        return {}
    values = np.array([*losses.values()])
    off = (values - np.median(values)) / max(float(np.median(values)), LOW_LOSS)
    scores = off / np.hypot(_spread(off), 0.02)
    return {node: (float(off[i]), float(scores[i])) for i, node in enumerate(losses)}


def _clients_apart(excess_by_client: Mapping[Node, Sequence[tuple[float, float]]]) -> dict[Node, float]:
    """Return the clients far above all others in the newest participations, where the others hold similar data."""
    if float(np.median(np.abs([values[-1][0] for values in excess_by_client.values()]))) > ALIKE:
        return {}
    apart = {}
    for node, values in excess_by_client.items():
        newest = values[-LASTING:]
        if len(newest) == LASTING and min(s for _, s in newest) > FAR and min(off for off, _ in newest) > BEHIND:
            apart[node] = newest[-1][1]
    return apart


def _clients_risen(excess_by_client: Mapping[Node, Sequence[tuple[float, float]]], lasting: int) -> dict[Node, float]:
    """Return the clients whose newest participations all exceed the earlier ones, far more than others' moved.

    With fewer than a fair share of the cohort the change must be larger: among many clients one or two always move.
    """
    rises, clear = {}, set()
    for node, values in excess_by_client.items():
        offs = np.array([off for off, _ in values])
        newest, before = offs[-lasting:], offs[-lasting - BEFORE : -lasting]
        if len(before) >= LASTING:
            rises[node] = float(np.median(newest) - np.median(before))
            sudden = newest[0] - before[-1] > rises[node] / 2  # sudden, not gradual as with rare classes
            if newest.min() > before.max() and rises[node] > BEHIND / 2 and sudden:
                clear.add(node)
    if len(rises) < FEW_KNOWN + 1:
        return {}
    changes = np.array([*rises.values()])
    scores = dict(zip(rises, (changes - np.median(changes)) / np.hypot(_spread(changes), 0.01), strict=True))
    wanted = max(LEAST_GROUP, int(np.ceil(FAIR_SHARE * len(rises))))
    limit = RISEN.get(wanted, RISEN_MANY)
    unlike = float(np.median(np.abs([values[-1][0] for values in excess_by_client.values()])))
    if unlike > UNLIKE:  # the losses of clients with little in common move anyway
        limit = max(limit, RISEN_UNLIKE) if wanted > LEAST_GROUP else np.inf
    risen = {node: float(scores[node]) for node in clear if scores[node] > limit}
    return risen if len(risen) >= wanted else {}


def _spread(values: Array) -> float:
    """Return a robust standard deviation."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def running_statistics(history: History, round_index: int) -> Iterator[Finding]:
    """BATCH_NORM_STATISTICS: running variances that are negative, not finite, or far wider than the peers'.

    Clients are not reported once the global model's were broken in an earlier round: they train on what they are sent.
    """
    layers = history.layers("buffer")
    rows = [i for i, name in enumerate(layers) if name.endswith("running_var")]
    if not rows:
        return
    nodes, sums = history.across("buffer", BUFFER_SIGNS, round_index)
    clients = set(clients_of(history, round_index))
    peers = [i for i, node in enumerate(nodes) if node in clients]
    broken = _broken(sums, rows)
    widest = np.where(broken[:, None], np.nan, np.log(np.clip(sums[:, rows, 1], 1e-30, 1e30)))
    inherited = _sent_broken(history, round_index, rows)
    for i, node in enumerate(nodes):
        if node != SERVER and (inherited or node not in clients):
            continue
        usual = _medians(widest[[j for j in peers if j != i]])
        times = widest[i] - usual if i in peers else np.full(len(rows), np.nan)
        if not broken[i] and np.mean(times > np.log(WIDE)) < WIDE_LAYERS:
            continue
        who = "the global model" if node == SERVER else node
        worst = int(np.argmax(np.nan_to_num(times, nan=-np.inf)))
        how = "are negative, NaN or infinite" if broken[i] else f"are up to {np.exp(times[worst]):.0f} times the peers'"
        peers_own = None if np.isnan(usual[worst]) else float(np.exp(usual[worst]))
        number = Number("buffer", float(sums[i, rows[worst], 1]), peers_own)
        yield finding(
            "BATCH_NORM_STATISTICS",
            round_index,
            f"Running variances of {who} {how}.",
            confidence=1.0 if broken[i] else 0.95,
            node=None if node == SERVER else node,
            layer=None if broken[i] else layers[rows[worst]],
            numbers=[number],
        )


def _broken(sums: Array, rows: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return for each node whether a buffer is not finite, or a running variance (`rows`) is negative."""
    return np.asarray((sums[..., 2:] > 0).any((1, 2)) | (sums[:, rows, 0] < 0).any(1))


def _sent_broken(history: History, round_index: int, rows: Sequence[int]) -> bool:
    """Return whether the global model's buffers were broken after a recent round."""
    for past_round in rounds_until(history, round_index - 1, INHERITED):
        nodes, sums = history.across("buffer", BUFFER_SIGNS, past_round)
        server = [i for i, node in enumerate(nodes) if node == SERVER]
        if server and _broken(sums[server], rows).any():
            return True
    return False


def _medians(peers: Array) -> Array:
    """Return the median of each layer over the peers; NaN if fewer than three report it."""
    known = np.count_nonzero(~np.isnan(peers), axis=0) >= 3
    usual = np.full(peers.shape[1], np.nan)
    usual[known] = np.nanmedian(peers[:, known], axis=0)
    return usual


DETECTORS: tuple[Detector, ...] = (weight_explosion, dominant_clients, group_left_behind, running_statistics)
