# SPDX-License-Identifier: Apache-2.0
"""Detectors of system problems: clients that fail, are late or slow, or lose telemetry.

Clients that stay away or lose messages are in `absence`.

What a host reports as an error is a finding at once. What healthy clients also do now and then (miss a deadline) is a
finding only when it happens to a client too often to be chance, given the rate of the other clients.

No finding quotes the text of an exception: a client wrote it, and findings pass every privacy level. They name the
class of the error; the text stands in the event, where the privacy level allows it.
"""

from __future__ import annotations

import errno
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedvitals.diagnosis.detectors.absence import drop_outs, frequent_failures, lost_messages
from fedvitals.diagnosis.detectors.memory import KILLED, killed_words, memory_words
from fedvitals.diagnosis.evidence.attendance import (
    TRAIN,
    events_in,
    everyone_failed,
    newest_values,
    phases_of,
    rounds_until,
    values_up_to,
)
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Event, Finding, Suspect

SLOW = 4.0  # times its peers
SLOWER = 3.0  # times its own past, relative to the peers
SLOW_SCORE = 4.0  # and this many robust standard deviations
SPREAD = 0.15  # of the logarithm of times: variation that machines always have
SLOW_ROUNDS = 3  # consecutive participations
FEWEST_PEERS = 4  # clients; below this a median says little
KIND_OF_DEVICE = 0.25  # share of the cohort
HANGING_SECONDS = 600.0
HANGING = 100.0  # times its peers: no computation is this slow
REAL_SECONDS = 0.5  # more than its peers, on a real clock, because a busy machine is not a finding
BY_CHANCE = 0.05  # expected number of such stretches in the run, if clients become slow at random
TIMES = (  # the times compared, and how many seconds more than its peers make a client slow
    ("time.compute_virtual", 0.0),
    ("time.client_virtual", 0.0),
    ("time.client", REAL_SECONDS),
    ("time.client_evaluate", REAL_SECONDS),
)

# The reason quotes what the client sent, so it only appears in the event.
LIMITED_WORDS = "{} brought more names or records than one client may; the event `telemetry.refused` names the limit."
REFUSED_WORDS = "Telemetry of {} was refused, whole or in part; the event `telemetry.refused` says why."
MOST_SUSPECTS = 20
YEAR_SECONDS, DAY_SECONDS = 365.25 * 86_400, 86_400

BOUND = 0.5  # share of a round
BOUND_ROUNDS = 5  # in a row
BOUND_SECONDS = 1.0  # a round: a shorter one needs no remedy
BOTTLENECKS = {  # and the finding's wording; computing is not a bottleneck but the purpose
    "straggler": "waiting for the slowest clients",
    "upload": "sending updates to the server",
    "download": "sending the model to clients",
    "data_loading": "loading data",
    "aggregation": "aggregating updates",
    "server": "receiving updates and evaluating at the server",
}

MEMORY = re.compile(
    r"out of memory|not enough memory|MemoryError|OutOfMemory|cannot allocate|could not be allocated|\bKilled\b|"
    r"WorkerKilled",
    re.IGNORECASE,
)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
DISK = re.compile(r"Errno 28|ENOSPC|no space left|disk quota|disk (is )?full|Errno 122", re.IGNORECASE)


def failures(history: History, round_index: int) -> Iterator[Finding]:
    """CRASH, OUT_OF_MEMORY or DISK_FULL for each client whose training ended with an error.

    If all clients failed they are one case: NOTHING_AGGREGATED for training, CRASH for evaluation.
    """
    seen: set[tuple[str, Node | None]] = set()
    phases = {str(data.get("phase")) for data in phases_of(history, round_index) if _nobody_answered(data)} - {TRAIN}
    phases |= {TRAIN} if everyone_failed(history, round_index) else set()
    events = list(events_in(history, round_index, "client.failed", "edge.failed", "round.failed"))
    of_clients = {_error_of(event) for event in events if event.name == "client.failed"}
    of_rounds = {_error_of(event) for event in events if event.name == "round.failed"}
    for event in events:
        if event.name == "round.failed" and _error_of(event) in of_clients:
            continue  # one exception that left both scopes: the client's finding reports it
        issue = _kind_of_failure(event)
        common = event.name == "client.failed" and event.data.get("phase", TRAIN) in phases
        if common or (issue, event.where.node) in seen:
            continue
        seen.add((issue, event.where.node))
        who = event.where.node or "The round"
        since = _first_round_of(history, round_index, event)
        before = "" if since == round_index else f" (since round {since})"
        error = f" with {event.data['exception']}" if event.data.get("exception") is not None else ""
        phase = event.data.get("phase", TRAIN)
        asked = "" if phase == TRAIN else f" when asked to {phase}"
        ended = event.name == "client.failed" and _error_of(event) in of_rounds
        text, sure = f"{who} failed{asked}{error}{before}{', which ended the round' if ended else ''}.", 1.0
        shares: Mapping[str, Any] = {}
        if issue == "OUT_OF_MEMORY":
            text, sure = killed_words(history, round_index, event) or (text, sure)
            words, shares = memory_words(history, round_index, event)
            text += words
        yield finding(
            issue,
            round_index,
            text,
            confidence=sure,
            since=since,
            node=event.where.node,
            group=event.where.group,
            severity="critical" if ended or event.where.node is None else "warning",
            more={"event": event.name, **{k: event.data[k] for k in ("exception",) if k in event.data}, **shares},
        )
    for phase in sorted(phases - {TRAIN}):
        yield from _failed_phase(history, round_index, phase)
    for event in events_in(history, round_index, "monitor.error", "log"):
        if event.level in ("warning", "error", "critical") and DISK.search(event.message) and event.where.node is None:
            doing = f", said by {event.data['doing']}" if "doing" in event.data else ""
            yield finding("DISK_FULL", round_index, f"The server's disk is full{doing}.", confidence=0.95)
            return


def _error_of(event: Event) -> tuple[Any, str]:
    return event.data.get("exception"), event.message


def _nobody_answered(phase: Mapping[str, Any]) -> bool:
    return len(phase.get("failed", ())) > 1 and not phase.get("answered")


def _failed_phase(history: History, round_index: int, phase: str) -> Iterator[Finding]:
    """Report as one case that all clients failed in a phase other than training."""
    events = [e for e in events_in(history, round_index, "client.failed") if e.data.get("phase") == phase]
    if not events:
        return
    kinds = Counter(str(event.data.get("exception", "an error")) for event in events)
    counts = ", ".join(f"{kind} ({count})" if len(kinds) > 1 else kind for kind, count in kinds.most_common())
    text = f"All {len(events)} clients that were asked to {phase} failed: {counts}."
    suspects = [
        Suspect(event.where.node, 1 / len(events), str(event.data.get("exception", "")))
        for event in events[:MOST_SUSPECTS]
        if event.where.node is not None
    ]
    since = min(_first_round_of(history, round_index, event) for event in events)
    yield finding("CRASH", round_index, text, confidence=1.0, since=since, suspects=suspects, more={"phase": phase})


def _kind_of_failure(event: Event) -> str:
    text = f"{event.data.get('exception', '')} {event.message}"
    if DISK.search(text) or event.data.get("errno") in NO_SPACE:
        return "DISK_FULL"
    return "OUT_OF_MEMORY" if MEMORY.search(text) or KILLED.search(text) else "CRASH"


def _first_round_of(history: History, round_index: int, event: Event) -> int:
    same = [
        other.where.round
        for other in history.events(event.name)
        if other.where.node == event.where.node and other.where.round is not None and other.where.round <= round_index
    ]
    return min(same, default=round_index)


def late(history: History, round_index: int) -> Iterator[Finding]:
    """TIMEOUT: a client that repeatedly misses the deadline, or whose connection hangs if there is none."""
    yield from frequent_failures(history, round_index, "TIMEOUT", "missed the deadline", "update.late")
    seconds = history.latest("time.client_virtual", round_index)
    usual = float(np.median([*seconds.values()])) if len(seconds) > 2 else np.inf
    for node, value in seconds.items():
        if value > HANGING_SECONDS and value > HANGING * usual:
            text = f"{node} took {value:,.0f} s; its peers took {usual:.3g} s."
            number = Number("time.client_virtual", value, usual)
            yield finding("TIMEOUT", round_index, text, confidence=0.95, node=node, numbers=[number])


def stragglers(history: History, round_index: int) -> Iterator[Finding]:
    """STRAGGLER: several times as slow as its peers or its own past for the same work, several rounds in a row."""
    for name, least in TIMES:
        seconds = history.latest(name, round_index)
        if seconds:
            slow = [*_slow_clients(history, round_index, name, least)]
            yield from slow
            if slow or name == "time.client_virtual":
                return  # real seconds mean nothing while a virtual clock runs


def _slow_clients(history: History, round_index: int, name: str, least: float) -> Iterator[Finding]:
    seconds = history.latest(name, round_index)
    peers = float(np.median([*seconds.values()]))
    if not any(value > np.sqrt(SLOW) * peers and value - peers >= least for value in seconds.values()):
        return
    numbers = rounds_until(history, round_index)
    scores = _slowness(history, numbers, name)
    findings: list[Finding] = []
    slow = 0
    for node in scores[round_index]:
        own = [number for number in numbers if node in scores[number]]
        newest, before = own[-SLOW_ROUNDS:], own[:-SLOW_ROUNDS]
        off, score = (_median([scores[number][node][i] for number in newest]) for i in (0, 1))
        slow += off > np.log(SLOW) / 2
        steady = len(newest) == SLOW_ROUNDS and min(scores[number][node][0] for number in newest) > np.log(SLOW) / 2
        past = _median([scores[number][node][0] for number in before]) if before else off
        changed = len(before) >= SLOW_ROUNDS and off - past > np.log(SLOWER)
        slower = changed or (off > np.log(SLOW) and score > SLOW_SCORE)
        if not steady or not slower or seconds[node] - peers < least or (least and _is_chance(scores, numbers, node)):
            continue
        work = "same evaluation" if name == "time.client_evaluate" else "same work"
        text = f"{node} takes {np.exp(off):.3g} times as long as its peers for the {work}."
        text += " It was not so before." if changed else ""
        number = Number(name, seconds[node], peers, score)
        more = {"changed": changed}
        findings.append(
            finding(
                "STRAGGLER", round_index, text, confidence=0.95, since=newest[0], node=node, numbers=[number], more=more
            )
        )
    # If many are slow from the start, they are another kind of device, as healthy as the rest.
    many = slow > max(1, KIND_OF_DEVICE * len(scores[round_index]))
    yield from (slow_client for slow_client in findings if slow_client.evidence["changed"] or not many)


def _is_chance(scores: Mapping[int, Mapping[Node, tuple[float, float]]], numbers: Sequence[int], node: Node) -> bool:
    """Return whether a node's stretch of slow rounds may be chance, given how often other clients become slow.

    On a busy machine the clients take turns waiting for a processor.
    """
    limit = math.log(SLOW) / 2
    began, rested, length = 0, 0, 0
    for client in {client for by_node in scores.values() for client in by_node}:
        slow = [scores[number][client][0] > limit for number in numbers if client in scores[number]]
        if client == node:
            length = next((i for i, is_slow in enumerate(reversed(slow)) if not is_slow), len(slow))
            continue
        began += sum(now and not before for before, now in itertools.pairwise([False, *slow]))
        rested += slow.count(False)
    rate = began / max(1, began + rested)
    return began * rate ** (length - 1) > BY_CHANCE


def _slowness(history: History, numbers: Sequence[int], name: str) -> dict[int, dict[Node, tuple[float, float]]]:
    """Return for each round how many times longer than the median a client took, and in robust deviations.

    Both of the logarithm. Clients with more work may take longer, so times are compared as they are, per step, or per
    sample, whichever makes the clients most alike over these rounds; but hardly more than as they are, since a client
    with almost no work still has a start-up time.
    """
    measures = {work: {n: _over_median(history, n, name, work) for n in numbers} for work in ("", "steps", "samples")}
    spread = {
        work: sum(_spread_over_median(history, n, name, work) for n, offs in by_round.items() if offs)
        for work, by_round in measures.items()
    }
    chosen_work = min(spread, key=lambda work: spread[work])
    chosen = measures[chosen_work]
    by_round: dict[int, dict[Node, tuple[float, float]]] = {}
    twice = math.log(2)
    for round_index in numbers:
        scale = float(np.hypot(_spread_over_median(history, round_index, name, chosen_work), SPREAD))
        offs = {node: min(off, measures[""][round_index][node] + twice) for node, off in chosen[round_index].items()}
        by_round[round_index] = {node: (off, off / scale) for node, off in offs.items()}
    return by_round


def _median(values: Sequence[float]) -> float:
    """Return the same as `numpy.median`, in a fraction of the time for a few values."""
    ordered = sorted(values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return math.nan if any(map(math.isnan, values)) else middle


@shared
def _over_median(history: History, round_index: int, name: str, work: str) -> dict[Node, float]:
    """Return the logarithm of each client's time (per unit of `work`, if named) minus the median."""
    seconds = {node: v for node, v in history.latest(name, round_index).items() if 0 < v < math.inf}
    if len(seconds) < FEWEST_PEERS:
        return {}
    done = history.latest(work, round_index) if work else {}
    values = np.log([*seconds.values()]) - np.log([max(done.get(node, 1.0), 1.0) for node in seconds])
    return dict(zip(seconds, (values - np.median(values)).tolist(), strict=True))


@shared
def _spread_over_median(history: History, round_index: int, name: str, work: str) -> float:
    return _spread([*_over_median(history, round_index, name, work).values()])


def _spread(offs: Sequence[float]) -> float:
    """Return a robust standard deviation of values around 0."""
    return 1.4826 * float(np.median(np.abs(offs))) if offs else 0.0


def clocks(history: History, round_index: int) -> Iterator[Finding]:
    """CLOCK_SKEW: a client's times are impossible: it began before it was asked, or sent after its reply arrived."""
    for node, seconds in history.latest("time.clock_error", round_index).items():
        if abs(seconds) > 0.5:
            way = "ahead" if seconds > 0 else "behind"
            text = f"The clock of {node} is {time_words(abs(seconds))} {way}, at least."
            number = Number("time.clock_error", seconds, 0.0, of="limit")
            yield finding("CLOCK_SKEW", round_index, text, confidence=1.0, node=node, numbers=[number])


def time_words(seconds: float) -> str:
    """Return a duration that may be very long, in words: «12.3 s», «3.5 days», «56.7 years»."""
    if seconds < DAY_SECONDS:
        return f"{seconds:,.1f} s"
    years = seconds / YEAR_SECONDS
    return f"{seconds / DAY_SECONDS:,.1f} days" if years < 1 else f"{years:.3g} years"


def lost_telemetry(history: History, round_index: int) -> Iterator[Finding]:
    """TELEMETRY_LOST: a client trained but its measurements did not arrive, or records were lost here."""
    events = events_in(history, round_index, "worker.lost", "telemetry.refused", "client.failed")
    failed = {event.where.node for event in events if event.name == "client.failed"}
    # If a client both sent too much and broke a rule, the broken rule is reported.
    mild_first = sorted(events, key=lambda event: not _is_about_amount(event))
    lost = {event.where.node: event for event in mild_first if event.name != "client.failed"}
    for node, event in lost.items():
        if node not in failed:
            amount = _is_about_amount(event)
            words = (LIMITED_WORDS if amount else REFUSED_WORDS).format(node)
            yield finding(
                "TELEMETRY_LOST",
                round_index,
                event.message if event.name == "worker.lost" else words,
                severity="note" if amount else None,
                confidence=1.0,
                since=_first_round_of(history, round_index, event),
                node=node,
            )
    counts = newest_values(history.series("monitor.lost", None), round_index, 2)
    before = counts[-2][1] if len(counts) > 1 else 0.0
    named = sum(_records_lost(event) for event in events)
    more = counts[-1][1] - before - named if counts and counts[-1][0] == round_index else 0.0
    if more > 0 and None not in lost:
        text = f"{more:.0f} records were lost before they were stored."
        number = Number("monitor.lost", counts[-1][1], before, of="own past")
        yield finding("TELEMETRY_LOST", round_index, text, confidence=1.0, numbers=[number])


def _is_about_amount(event: Event) -> bool:
    """Return whether a client reached a limit on its names or records, rather than breaking a rule."""
    return event.name == "telemetry.refused" and event.level == "info"


def _records_lost(event: Event) -> int:
    """Return how many of the records counted by `monitor.lost` an event accounts for."""
    records = event.data.get("records")
    if event.data.get("claimed") is True:  # by a client, which may lie: not counted here
        return 0
    if event.name == "worker.lost":
        return records if isinstance(records, int) and records > 0 else 1
    return records if event.name == "telemetry.refused" and isinstance(records, int) else 0


def bottleneck(history: History, round_index: int) -> Iterator[Finding]:
    """BOTTLENECK: most of each round is spent on the same thing other than computing.

    Judged up to the previous round.
    """
    numbers = rounds_until(history, round_index - 1, BOUND_ROUNDS)
    if len(numbers) < BOUND_ROUNDS:
        return
    for kind, words in BOTTLENECKS.items():  # stragglers first: what delays them does not affect all
        series = history.series(f"bottleneck.{kind}", None)
        newest = dict(newest_values(series, round_index - 1, BOUND_ROUNDS))
        kind_shares = [newest.get(number, 0.0) for number in numbers]
        if min(kind_shares) < BOUND:
            continue
        seconds = dict(zip(*history.series("time.round", None), strict=True))
        seconds |= dict(zip(*history.series("time.round_virtual", None), strict=True))
        typical = float(np.median([seconds.get(number, 0.0) for number in numbers]))
        if typical < BOUND_SECONDS:
            return
        since = _bound_since(dict(values_up_to(series, round_index - 1)), numbers[0])
        share = float(np.median(kind_shares))
        named = _straggler_words(history, numbers) if kind == "straggler" else ""
        saved = "would be saved without" if kind == "straggler" else "goes to"
        text = f"Of a round of {typical:.3g} s, {100 * share:.0f} % {saved} {words}{named}."
        number = Number(f"bottleneck.{kind}", share, BOUND, of="limit")
        yield finding(
            "BOTTLENECK", round_index, text, confidence=0.9, since=since, numbers=[number], more={"bound_by": kind}
        )
        return


def _bound_since(shares: Mapping[int, float], first: int) -> int:
    """Return the round since which the bottleneck has lasted without interruption."""
    for round_index in sorted((n for n in shares if n < first), reverse=True):
        if shares[round_index] < BOUND:
            break
        first = round_index
    return first


def _straggler_words(history: History, numbers: Sequence[int]) -> str:
    """Return which client most of these rounds waited for, in words; empty if there is no single one."""
    last = Counter(node for round_index in numbers for node in history.latest("time.critical", round_index))
    node, times = last.most_common(1)[0] if last else ("", 0)
    return f", {node} in {times} of the last {len(numbers)} rounds" if times > len(numbers) / 2 else ""


DETECTORS: tuple[Detector, ...] = (
    failures,
    drop_outs,
    lost_messages,
    late,
    stragglers,
    clocks,
    lost_telemetry,
    bottleneck,
)
