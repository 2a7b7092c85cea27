# SPDX-License-Identifier: Apache-2.0
"""Reasons why a run without findings may still be unhealthy.

These are failed detectors, failed measurements, missing records, and client-rounds that could not be judged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fedvitals.diagnosis.abstentions import Examined
from fedvitals.plural import counted
from fedvitals.records import Event, natural

MONITOR_ERROR = "monitor.error"  # the event that reports a failure of the monitor itself
OUTSIDE_ROUND = "client.outside_round"  # the event that reports a client outside any round
UNSEEN = "workflow.unseen"  # the event that says that the server sees neither rounds nor updates
SINK_LOST = "sink.lost"  # the event that reports records lost by a sink other than the store
NOTHING_SEEN = (
    "clients train and aggregate among themselves in this workflow, and the server sees neither their rounds nor their "
    "updates"
)
NO_LOSSES: Mapping[str, int] = MappingProxyType({})
DETECTOR = "the detector "
NAMED = 3  # of the affected clients or steps; the others are counted
# Work that no detector depends on: the tape, the user's own sinks and metrics, corrections, machine metrics, and
# probes for classifiers only, which reject models of sequences, images or single numbers.
UNRELATED = (
    "the probe 'scale'", "the probe 'nonlinearity'",
    "taping", "recording a", "opening the tape", "flushing the tape", "ending the tape", "telling of the tape",
    "log()", "event()", "headers()", "truth()",
    "sampling the machine", "watching the machine", "recording operators", "answering a finding",
    "prescribing", "refused()", "looking up the run",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MonitorFailure:
    """A failed step of the monitor: what it was doing, the kind of error, and where."""

    doing: str
    exception: str
    round: int | None = None
    node: str | None = None


def monitor_failure_of(event: Event) -> MonitorFailure | None:
    """Return the failure that an event reports; None for any other event."""
    if event.name != MONITOR_ERROR:
        return None
    doing, exception = (str(event.data.get(key) or "") for key in ("doing", "exception"))
    return MonitorFailure(doing, exception, event.where.round, event.where.node)


def gaps(
    failures: Iterable[MonitorFailure],
    lost: int,
    thinned: int = 0,
    *,
    examined: Examined | None = None,
    sinks: Mapping[str, int] = NO_LOSSES,
    outside: Collection[str] = (),
    unseen: bool = False,
) -> tuple[str, ...]:
    """Return in words why a run was not fully examined; empty if it was.

    `thinned`: client-rounds, see `monitor.thinned`. `examined`: what was examined, if known; a small share that could
    not be judged is not a gap. `sinks`: records lost by sinks other than the store. `outside`: clients that trained
    outside any round. `unseen`: whether the server sees nothing of the training. Only a client's name is quoted,
    because it may have written the rest itself.
    """
    related = [failure for failure in failures if not failure.doing.startswith(UNRELATED)]
    of_server = [failure for failure in related if failure.node in (None, "server")]
    detectors = [failure for failure in of_server if failure.doing.startswith(DETECTOR)]
    others = [failure for failure in of_server if not failure.doing.startswith(DETECTOR)]
    reasons = [NOTHING_SEEN] if unseen else []
    reasons += [*_named(detectors, "detectors"), *_named(others, "other steps")]
    clients = {failure.node for failure in related if failure.node not in (None, "server")}
    if clients:
        reasons.append(f"what was measured of {_names(clients)} is incomplete")
    if outside:
        reasons.append(f"{_names(outside)} trained outside of any round, where nobody is compared")
    if examined is not None and not examined.sufficient:
        reasons += examined.gaps
    if lost:
        reasons.append(f"{_records(lost)} {'was' if lost == 1 else 'were'} lost")
    reasons += [f"the sink '{name}' has lost {_records(count)}" for name, count in sinks.items()]
    if thinned:
        count = "1 client-round" if thinned == 1 else f"{thinned} client-rounds"
        reasons.append(f"layer statistics of {count} were left out, the store or the detectors being too slow")
    return tuple(reasons)


def statement(detectors: int, reasons: Sequence[str], examined: Examined | None, *, silent: bool) -> str:
    """Return the statement about an examination: shown with findings, or (`silent`) instead of them.

    `reasons`: why it was not complete. An all-clear names what was examined.
    """
    if reasons:
        return no_all_clear(reasons) if silent else incomplete(reasons)
    looked_at = "." if examined is None else f" at {examined}."
    if silent:
        which = "." if examined is None else f", which looked{looked_at}"
        return f"No findings by {counted(detectors, 'detector')}{which}"
    return f"{counted(detectors, 'detector')} looked{looked_at}"


def no_all_clear(reasons: Sequence[str]) -> str:
    """Return the sentence that replaces «no findings»."""
    if NOTHING_SEEN in reasons:
        return f"Not judged, because {'; '.join(reasons)}."
    return f"No findings, but not fully examined: {'; '.join(reasons)}."


def incomplete(reasons: Sequence[str]) -> str:
    """Return the sentence that accompanies findings of an incomplete examination."""
    return f"Not fully examined: {'; '.join(reasons)}."


def _named(failures: Sequence[MonitorFailure], kind: str) -> list[str]:
    """Return «the detector 'plateau' failed in round 3 (TypeError)» for the first failures, and a count of the rest."""
    first: dict[str, MonitorFailure] = {}
    for failure in failures:
        first.setdefault(failure.doing or "a step of the monitor", failure)
    sentences = [
        f"{doing} failed{'' if failure.round is None else f' in round {failure.round}'}"
        f"{f' ({failure.exception})' if failure.exception else ''}"
        for doing, failure in first.items()
    ]
    rest = len(sentences) - NAMED
    return sentences if rest <= 0 else [*sentences[:NAMED], f"{rest} {kind} failed, too"]


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"


def _names(clients: Iterable[str | None]) -> str:
    return _listed(sorted((name for name in clients if name is not None), key=natural), "more")


def _listed(names: Sequence[str], rest: str) -> str:
    if len(names) <= NAMED:
        return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} {rest}"
