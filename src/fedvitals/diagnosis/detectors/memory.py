# SPDX-License-Identifier: Apache-2.0
"""Explains why a client ran out of memory: what took most of it, and what would have fitted."""

from __future__ import annotations

import math
import re
from typing import Any

from fedvitals.diagnosis.evidence.attendance import values_up_to
from fedvitals.diagnosis.memory_fit import SHARES, WORDS, largest_share, memory_remedies, predicted_peak, size_words
from fedvitals.protocols import History, Node
from fedvitals.records import Event

REAL_PART = 0.2  # of the process, or of available memory: smaller tensors did not fill it
FILLED = 0.5  # of available memory: a process below this was refused one large allocation, or others filled the rest
KILLED = re.compile(r"worker process .*killed", re.IGNORECASE)  # as the lab words it


def memory_words(history: History, round_index: int, event: Event) -> tuple[str, dict[str, Any]]:
    """Return what took most memory and what would have fitted, as a text and its evidence.

    A step's tensors are only blamed if they are a substantial part of the process or of the available memory.
    """
    node = event.where.node
    shares, batch, tried = _shares_of(history, round_index, node)
    if not shares:
        return "", {}
    text, peak = "", predicted_peak(shares, batch, tried)
    limit = newest_value(history, "memory.limit", round_index, node)
    resident = newest_value(history, "memory.resident", round_index, node)
    wholes = [whole for whole in (resident, limit) if whole]
    more: dict[str, Any] = {"shares": shares, "peak_bytes": peak}
    more |= {"resident_bytes": resident} if resident else {}
    if wholes and peak < REAL_PART * min(wholes):
        return _other_than_tensors(peak, resident, limit), more | {"limit_bytes": limit, "explained": False}
    if batch and tried and tried != batch and "activations" in shares:
        shares = {**shares, "activations": shares["activations"] * tried / batch}
        more["shares"] = shares
    largest = largest_share(shares)
    # Do not blame our own telemetry unless it alone is a substantial part.
    ours = largest is not None and largest[0] == "telemetry"
    if largest is not None and not (ours and shares["telemetry"] < REAL_PART * min(wholes, default=math.inf)):
        name, part = largest
        text += (
            f" {WORDS[name].capitalize()} took most: {size_words(shares[name])}, {100 * part:.0f} % of a step's tensors"
        )
        text += f" (batch of {tried or batch:.0f})." if name == "activations" and (tried or batch) else "."
        more["largest"] = name
    free = _available(history, round_index, limit, peak)
    if free is not None:
        remedies = memory_remedies(shares, free, tried or batch)
        more |= {"limit_bytes": limit, "remedies": {remedy.kind: remedy.value for remedy in remedies}}
        if remedies:
            text += f" In {size_words(free)} would fit: {'; or '.join(remedy.text for remedy in remedies)}."
    return text, more


def _shares_of(
    history: History, round_index: int, node: Node | None
) -> tuple[dict[str, float], float | None, float | None]:
    """Return bytes by share, the batch size for which activations were measured, and the current one.

    Uses the client's last reported values; what it never reported is taken from its peers, which train the same model.
    """
    newest: dict[str, float] = {}
    measured: float | None = None
    for who in [node, *(n for n in history.nodes() if n != node)]:
        series = {
            name: dict(values_up_to(history.series(f"memory.{name}", who), round_index)) for name in (*SHARES, "batch")
        }
        for name in SHARES:
            if series[name] and name not in newest:
                last = max(series[name])
                newest[name] = series[name][last]
                if name == "activations":
                    measured = series["batch"].get(last)
        if "activations" in newest and "model" in newest:
            break
    tried = None if node is None else history.latest("memory.batch", round_index).get(node)
    shares = {name: size for name, size in newest.items() if size == 0 or 1 <= size < math.inf}
    return shares, _samples(measured), _samples(tried) or _samples(measured)


def _samples(batch: float | None) -> float | None:
    """Return the size of a batch if it is plausible: a client may report anything."""
    return batch if batch is not None and 1 <= batch < math.inf else None


def _other_than_tensors(peak: float, resident: float | None, limit: float | None) -> str:
    """Return where to look instead: data, caches and results, or a single allocation that was too large."""
    text = f" What took the memory is not in the model's tensors, which are {size_words(peak)} in a step"
    if resident is None:
        return f"{text}: look at data, caches and results that are kept."
    text += f"; the process held {size_words(resident)}"
    if limit is not None and resident < FILLED * limit:
        return f"{text} of {size_words(limit)}: one large piece was asked for, or other processes took the rest."
    return f"{text}: look at data, caches and results that are kept."


def newest_value(history: History, name: str, round_index: int, node: Node | None = None) -> float | None:
    """Return the node's last reported value of a metric; if it never reported one, any other node's."""
    for who in dict.fromkeys((node, None, *history.nodes())):
        values = [value for _, value in values_up_to(history.series(name, who), round_index) if math.isfinite(value)]
        if values:
            return values[-1]
    return None


def _available(history: History, round_index: int, limit: float | None, peak: float) -> float | None:
    """Return the bytes a step may take: the limit, or what others left of it if the process was far below it."""
    if limit is None:
        return None
    free = history.latest("machine.memory_free", round_index).get("server")
    if peak < limit / 2 and free is not None and free < peak:
        return free
    return limit


def killed_words(history: History, round_index: int, event: Event) -> tuple[str, float] | None:
    """Return what is known about what killed a process, with the confidence; None if it was not killed."""
    if event.data.get("exception") != "WorkerKilled" and not KILLED.search(event.message):
        return None
    kills = history.latest("machine.oom_kills", round_index).get("server", 0.0)
    who = event.where.node or "A process"
    if kills > 0:
        return f"The process of {who} was killed by the kernel, which had run out of memory.", 1.0
    resident, limit = (
        newest_value(history, f"memory.{name}", round_index, event.where.node) for name in ("resident", "limit")
    )
    small = resident is not None and limit is not None and resident < FILLED * limit  # others may have filled it
    return f"The process of {who} was killed, as the kernel does when memory runs out.", 0.6 if small else 0.8
