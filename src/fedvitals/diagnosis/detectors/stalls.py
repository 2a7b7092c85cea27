# SPDX-License-Identifier: Apache-2.0
"""Detector of rounds that stand still.

Meanwhile, the watching thread (`monitor.stall_watch`) records the event `round.stalled` and reports its finding at
once. When the round has ended, and on a stored run, the detector derives the finding from the same event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History
from fedvitals.records import Finding, Suspect
from fedvitals.time_parts import ROUND_SECONDS

STALLED = "round.stalled"  # the event
NAMED = 3  # of the awaited clients; the others are counted
MOST_SUSPECTS = 20
CONFIDENCE = 0.9
PARTS = {"aggregate": "aggregates", "evaluate": "evaluates", "receive": "reads what it received"}


def stall_words(stall: Mapping[str, Any]) -> str:
    """Return the data of a `round.stalled` event as two sentences: how long against the usual, and who is awaited."""
    text = f"It has taken {seconds_words(stall['seconds'])} so far; usual are {seconds_words(stall['usual_seconds'])}."
    return f"Round {stall['round']} stands still. {text} {waiting_words(stall)}"


def waiting_words(stall: Mapping[str, Any]) -> str:
    """Return whom or what the round is waiting for, as a sentence."""
    awaited, phase, silent = stall["awaited"], stall["phase"], seconds_words(stall["silent_seconds"])
    if not awaited:
        doing = PARTS.get(phase, f"is at «{phase}»" if phase else "")
        if doing:
            return f"No client is awaited: the server {doing} since {silent}."
        return f"No client is awaited: nothing has happened on the server for {silent}."
    names = [*awaited]
    others = len(names) - NAMED
    who = ", ".join(names[:NAMED]) + (f" and {others} more" if others > 0 else "")
    longest = seconds_words(max(awaited.values()))
    if stall["asked"]:
        return f"{who} did not answer: asked to {phase} {longest} ago."
    return f"{who} did not finish: began to {phase} {longest} ago."


def seconds_words(seconds: float) -> str:
    """Return a duration for people: «12 s», «3.4 min», «2.1 h»."""
    for unit, size in (("h", 3600.0), ("min", 120.0)):
        if seconds >= size:
            return f"{seconds / (3600 if unit == 'h' else 60):.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def stall_finding(stall: Mapping[str, Any], whole_seconds: float | None = None) -> Finding:
    """Return the finding STALLED for a `round.stalled` event's data.

    `whole_seconds`: how long the round took in the end; None while it is stalled.
    """
    more = {key: stall[key] for key in ("phase", "awaited", "waiting_since") if key in stall}
    text = stall_words(stall)
    if whole_seconds is not None:
        text = f"Round {stall['round']} stood still and went on. It took {seconds_words(whole_seconds)}; usual are "
        text += f"{seconds_words(stall['usual_seconds'])}. When it stood: {waiting_words(stall)}"
        more["over"] = True
    more |= {
        f"{who}_thread_{name}": stack for who, own in stall.get("stacks", {}).items() for name, stack in own.items()
    }
    reason = f"has not finished to {stall['phase']}"
    return finding(
        "STALLED",
        stall["round"],
        text,
        confidence=CONFIDENCE,
        numbers=[Number("time.round", stall["seconds"], stall["usual_seconds"], of="own past")],
        suspects=[Suspect(node, CONFIDENCE, reason) for node in [*stall["awaited"]][:MOST_SUSPECTS]],
        more=more,
    )


def stalled_rounds(history: History, round_index: int) -> Sequence[Finding]:
    """STALLED: the round stood still, as recorded by the watching thread at the time, and then continued."""
    stalls = [event.data for event in history.events(STALLED) if event.where.round == round_index]
    if not stalls:
        return ()
    lengths = dict(zip(*history.series(ROUND_SECONDS, None), strict=True))
    return (stall_finding(stalls[-1], lengths.get(round_index, stalls[-1]["seconds"])),)


DETECTORS: tuple[Detector, ...] = (stalled_rounds,)
