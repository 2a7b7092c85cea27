# SPDX-License-Identifier: Apache-2.0
"""Two things side by side, layer by layer: updates of two clients, of one and its cohort; models of two rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.replay.debugger import shown
from fedvitals.replay.debugger.shown import Shown
from fedvitals.replay.tape.digests import Tensors, first_difference
from fedvitals.replay.tape.retention import losses_of

if TYPE_CHECKING:
    from fedvitals.replay.debugger.session import Session

COHORT = "cohort"
WHOLE = "(all)"


def of_clients(session: Session, one: str, other: str) -> Shown:
    """Of the round at hand. `other` may be «cohort»: all the others, of which the mean and the median are taken."""
    number = session.round
    if one == other:
        raise ConfigError(f"{one} does not differ from itself. Name two clients, or:  diff {one} cohort.")
    if COHORT in (one, other):
        return _with_cohort(session, number, one if other == COHORT else other)
    first, second = (_update(session, number, node) for node in (one, other))
    rows = []
    for name, a, b in _pairs(first, second):
        rows.append((name, _norm(a), _norm(b), _norm(a - b), _cosine(a, b)))
    columns = ("layer", f"norm {one}", f"norm {other}", "distance", "cosine")
    return shown.table(f"updates of {one} and {other}, round {number}", columns, rows, _words(session, one, other))


def _with_cohort(session: Session, number: int, node: str) -> Shown:
    own = _update(session, number, node)
    came = [one for one in session.tape.entry(number).came if one.node != node and one.used and one.mark is not None]
    others = [_update(session, number, one.node) for one in came]
    if not others:
        raise ConfigError(f"Nothing came from anybody but {node} in round {number}: there is no cohort.")
    rows = []
    for name in (*own, WHOLE):
        mine, theirs = _flat(own, name), [_flat(one, name) for one in others]
        median = float(np.median([_norm(one) for one in theirs]))
        mean = torch.stack(theirs).mean(0)
        ratio = _norm(mine) / median if median else None
        rows.append((name, _norm(mine), median, ratio, _cosine(mine, mean)))
    columns = ("layer", f"norm {node}", "cohort's median", "ratio", "cosine to mean")
    note = f"The cohort: the {len(others)} others whose updates were used."
    return shown.table(f"update of {node} and of its cohort, round {number}", columns, rows, note)


def of_rounds(session: Session, first: int, second: int) -> Shown:
    """The global models at the beginnings of two rounds; one after the last is the run's end."""
    before, after = session.material.model(first), session.material.model(second)
    rows = []
    for name, a, b in _pairs(before, after):
        norm = _norm(a)
        rows.append((name, norm, _norm(b), _norm(b - a), _norm(b - a) / norm if norm else None, _cosine(a, b)))
    columns = ("layer", f"norm {first}", f"norm {second}", "distance", "relative", "cosine")
    apart = first_difference(before, after)
    note = "They are the same to the last bit." if apart is None else _metrics(session, first, second)
    return shown.table(f"model at the beginnings of rounds {first} and {second}", columns, rows, note)


def _metrics(session: Session, first: int, second: int) -> str:
    """Of these very models, tested at the ends of the rounds before; and who took part in one round only."""
    known, parts = session.tape.rounds, []
    if first - 1 in known and second - 1 in known:
        a, b = (session.tape.entry(number - 1).metrics for number in (first, second))
        parts = [f"{name} {shown.figure(a[name])} → {shown.figure(b[name])}" for name in a if name in b]
    if first in known and second in known:
        asked = [{came.node for came in session.tape.entry(number).came} for number in (first, second)]
        only = zip((first, second), (asked[0] - asked[1], asked[1] - asked[0]), strict=True)
        parts += [f"only in round {number}: {', '.join(sorted(nodes))}" for number, nodes in only if nodes]
    return "; ".join(parts)


def _words(session: Session, one: str, other: str) -> str:
    parts = []
    for node in (one, other):
        came = session.material.came(session.round, node)
        losses = losses_of(came)
        course = f", loss {shown.figure(float(losses[0]))} → {shown.figure(float(losses[-1]))}" if len(losses) else ""
        parts.append(f"{node}: weight {came.weight:g}{course}{'' if came.used else ', left out'}")
    return "; ".join(parts)


def _update(session: Session, number: int, node: str) -> Tensors:
    found = session.material.update(number, node)
    if found is None:
        raise ConfigError(f"Nothing of use came from {node} in round {number}:  clients  says why.")
    return found


def _pairs(first: Tensors, second: Tensors) -> list[tuple[str, Tensor, Tensor]]:
    if first.keys() != second.keys():
        raise ConfigError("They have not the same layers, and cannot be compared.")
    return [(name, _flat(first, name), _flat(second, name)) for name in (*first, WHOLE)]


def _flat(tensors: Tensors, name: str) -> Tensor:
    parts = tensors.values() if name == WHOLE else [tensors[name]]
    return torch.cat([tensor.reshape(-1).double() for tensor in parts])


def _norm(flat: Tensor) -> float:
    return float(torch.linalg.vector_norm(flat))


def _cosine(a: Tensor, b: Tensor) -> float | None:
    size = _norm(a) * _norm(b)
    return float(a @ b) / size if size else None
