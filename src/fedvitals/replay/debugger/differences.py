# SPDX-License-Identifier: Apache-2.0
"""Compare, layer by layer, the updates of two clients, of a client and the others, or the models of two rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.replay.debugger.debugger_output import DebuggerOutput, format_cell, table_output
from fedvitals.replay.shares import metric_in_words
from fedvitals.replay.tape.digests import Tensors, first_difference
from fedvitals.replay.tape.retention import losses_of

if TYPE_CHECKING:
    from fedvitals.replay.debugger.session import Session

OTHERS = "others"
WHOLE = "(all)"


def compare_clients(session: Session, first_node: str, second_node: str) -> DebuggerOutput:
    """Compare two clients' updates of the current round. One name may be «others»: mean and median of all others."""
    round_index = session.round
    if first_node == second_node:
        raise ConfigError(f"{first_node} does not differ from itself. Name two clients, or:  diff {first_node} others.")
    if OTHERS in (first_node, second_node):
        return _compare_with_others(session, round_index, first_node if second_node == OTHERS else second_node)
    first, second = (session.states.required_update(round_index, node) for node in (first_node, second_node))
    rows = [(name, _norm(a), _norm(b), _norm(a - b), _cosine(a, b)) for name, a, b in _pairs(first, second)]
    columns = ("layer", f"norm {first_node}", f"norm {second_node}", "distance", "cosine")
    title = f"updates of {first_node} and {second_node}, round {round_index}"
    return table_output(title, columns, rows, _reply_words(session, first_node, second_node))


def _compare_with_others(session: Session, round_index: int, node: str) -> DebuggerOutput:
    own = session.states.required_update(round_index, node)
    used = [came.node for came in session.tape.entry(round_index).came if came.used and came.mark is not None]
    others = [session.states.required_update(round_index, other) for other in used if other != node]
    if not others:
        raise ConfigError(f"Nothing came from anybody but {node} in round {round_index}: there are no others.")
    rows = []
    for name in (*own, WHOLE):
        mine, theirs = _flat(own, name), [_flat(other, name) for other in others]
        median = float(np.median([_norm(other) for other in theirs]))
        mean = torch.stack(theirs).mean(0)
        ratio = _norm(mine) / median if median else None
        rows.append((name, _norm(mine), median, ratio, _cosine(mine, mean)))
    columns = ("layer", f"norm {node}", "others' median", "ratio", "cosine to mean")
    note = f"The others: the {len(others)} other clients whose updates were used."
    return table_output(f"update of {node} and of the other clients, round {round_index}", columns, rows, note)


def compare_rounds(session: Session, first: int, second: int) -> DebuggerOutput:
    """Compare the global models at the beginnings of two rounds; the round after the last is the run's end."""
    before, after = session.states.model(first), session.states.model(second)
    rows = []
    for name, a, b in _pairs(before, after):
        norm = _norm(a)
        rows.append((name, norm, _norm(b), _norm(b - a), _norm(b - a) / norm if norm else None, _cosine(a, b)))
    columns = ("layer", f"norm {first}", f"norm {second}", "distance", "relative", "cosine")
    apart = first_difference(before, after)
    note = "They are the same to the last bit." if apart is None else _metrics(session, first, second)
    return table_output(f"model at the beginnings of rounds {first} and {second}", columns, rows, note)


def _metrics(session: Session, first: int, second: int) -> str:
    """Return the metrics of both models, tested at the end of the rounds before, and who took part in only one
    round.
    """
    known, parts = session.tape.rounds, []
    if first - 1 in known and second - 1 in known:
        a, b = (session.tape.entry(round_index - 1).metrics for round_index in (first, second))
        parts = [
            f"{name} {metric_in_words(name, a[name])} → {metric_in_words(name, b[name])}" for name in a if name in b
        ]
    if first in known and second in known:
        asked = [{came.node for came in session.tape.entry(round_index).came} for round_index in (first, second)]
        only = zip((first, second), (asked[0] - asked[1], asked[1] - asked[0]), strict=True)
        parts += [f"only in round {round_index}: {', '.join(sorted(nodes))}" for round_index, nodes in only if nodes]
    return "; ".join(parts)


def _reply_words(session: Session, first_node: str, second_node: str) -> str:
    parts = []
    for node in (first_node, second_node):
        came = session.states.reply_of(session.round, node)
        losses = losses_of(came)
        trend = f", loss {format_cell(float(losses[0]))} → {format_cell(float(losses[-1]))}" if len(losses) else ""
        parts.append(f"{node}: weight {came.weight:g}{trend}{'' if came.used else ', left out'}")
    return "; ".join(parts)


def _pairs(first: Tensors, second: Tensors) -> list[tuple[str, Tensor, Tensor]]:
    if first.keys() != second.keys():
        raise ConfigError("They do not have the same layers, and cannot be compared.")
    return [(name, _flat(first, name), _flat(second, name)) for name in (*first, WHOLE)]


def _flat(tensors: Tensors, name: str) -> Tensor:
    parts = tensors.values() if name == WHOLE else [tensors[name]]
    return torch.cat([tensor.reshape(-1).double() for tensor in parts])


def _norm(flat: Tensor) -> float:
    return float(torch.linalg.vector_norm(flat))


def _cosine(a: Tensor, b: Tensor) -> float | None:
    size = _norm(a) * _norm(b)
    return float(a @ b) / size if size else None
