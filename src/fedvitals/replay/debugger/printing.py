# SPDX-License-Identifier: Apache-2.0
"""What a session can print and plot: gradients, weights, updates, losses, metrics, batches, states.

Words after the noun may come in any order: a layer («conv1» is enough for conv1.weight), a client, a metric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fedvitals.errors import ConfigError, unknown
from fedvitals.replay.debugger import shown
from fedvitals.replay.debugger.shown import Shown, summary
from fedvitals.replay.tape import gradients
from fedvitals.replay.tape.digests import Tensors
from fedvitals.replay.tape.journal import spans
from fedvitals.replay.tape.retention import losses_of

if TYPE_CHECKING:
    from fedvitals.replay.debugger.session import Session

LAYER_COLUMNS = ("layer", "shape", "norm", "mean", "std", "min", "max", "NaN", "Inf", "zeros")

FEW = 12  # samples of a batch that are named


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person wants to see, with the session's place filled in."""

    round: int
    node: str | None
    layer: str | None
    rest: tuple[str, ...] = ()


def printed(session: Session, words: Sequence[str]) -> Shown:
    if not words:
        raise ConfigError(f"Print what? {', '.join(NOUNS)}; for example:  print weight, print update c7.")
    noun, *rest = words
    singular = noun if noun in NOUNS else noun.removesuffix("es" if noun == "batches" else "s")
    if singular in NOUNS:
        return NOUNS[singular](session, wanted(session, rest, free=singular in ("metric", "state")))
    if noun in session.layers or any(name.startswith(f"{noun}.") for name in session.layers):
        raise ConfigError(f"'{noun}' is a layer. Of what?  print weight {noun}, print gradient {noun}.")
    raise ConfigError(unknown("thing to print", noun, NOUNS))


def wanted(session: Session, words: Sequence[str], *, free: bool) -> Asked:
    node, layer, rest = session.node, None, []
    nodes = session.nodes
    for word in words:
        if word in nodes:
            node = word
        elif matching(word, session.layers):
            layer = word
        elif free:
            rest.append(word)
        else:
            raise ConfigError(unknown("layer or client", word, [*session.layers, *nodes]))
    return Asked(session.round, node, layer, tuple(rest))


def matching(word: str, layers: Iterable[str]) -> list[str]:
    """A layer by its name, or all tensors of a module by the module's."""
    names, module = [*layers], word.rstrip(".")
    return [word] if word in names else [name for name in names if name.startswith(f"{module}.")]


def _tensors(title: str, tensors: Tensors, layer: str | None, note: str = "") -> Shown:
    """One layer as a tensor, all of them as a table."""
    if layer is None:
        rows = []
        for name, tensor in tensors.items():
            s = summary(tensor, bins=1)
            shape = "×".join(map(str, s.shape))
            rows.append((name, shape, s.norm, s.mean, s.std, s.min, s.max, s.nan, s.inf, s.zeros))
        return shown.table(title, LAYER_COLUMNS, rows, note)
    names = matching(layer, tensors)
    if not names:
        raise ConfigError(f"There is nothing of '{layer}' here. There is: {', '.join(tensors)}.")
    if len(names) > 1:
        note = " ".join([note, f"Also: {', '.join(names[1:])}."]).strip()
    return shown.tensor(f"{title}, {names[0]}", tensors[names[0]], note)


def _client(asked: Asked, what: str) -> str:
    if asked.node is None:
        raise ConfigError(f"A {what} is a client's: name one (print {what} c7), or go into it first (into c7).")
    return asked.node


def gradient(session: Session, asked: Asked) -> Shown:
    """Of a client's step, as its optimiser gets it."""
    node = _client(asked, "gradient")
    if session.tape.setting.host != "lab":
        return _recorded_gradient(session, asked, node)
    step, note = session.at(node), session.exactness(node)
    title = f"gradient of {node}, round {asked.round}, step {step.number}"
    return _tensors(title, step.gradients or {}, asked.layer, note)


def _recorded_gradient(session: Session, asked: Asked, node: str) -> Shown:
    """Of a host whose steps cannot be run again here: what the tape was told to keep."""
    folder = session.tape.folder
    steps = [one.step for one in gradients.kept(folder) if (one.round, one.node) == (asked.round, node)]
    if not steps:
        raise ConfigError(
            f"The tape has no gradients of {node} in round {asked.round}. They are kept on request: "
            "fv.Tape().gradients(nodes=[...]) among the probes, at privacy level 4."
        )
    found = gradients.read(folder, asked.round, node, steps[0]) or {}
    note = f"From the tape, which has steps {spans(steps)}."
    return _tensors(f"gradient of {node}, round {asked.round}, step {steps[0]}", found, asked.layer, note)


def weight(session: Session, asked: Asked) -> Shown:
    """In a client: its own, before the step. Else the global model's, at the round's beginning."""
    if asked.node is not None and session.node == asked.node:
        step = session.at(asked.node)
        title = f"weights of {asked.node}, round {asked.round}, before step {step.number}"
        return _tensors(title, step.weights or {}, asked.layer, session.exactness(asked.node))
    if asked.node is not None:
        sent = session.material.sent(asked.round, asked.node)
        return _tensors(f"weights that {asked.node} sent in round {asked.round}", _there(sent, asked), asked.layer)
    return _tensors(
        f"weights at the beginning of round {asked.round}", session.material.model(asked.round), asked.layer
    )


def update(session: Session, asked: Asked) -> Shown:
    """What a client changed; without one, of all clients in the round."""
    if asked.node is not None:
        found = session.material.update(asked.round, asked.node)
        note = "What it sent, less what it was given."
        return _tensors(f"update of {asked.node}, round {asked.round}", _there(found, asked), asked.layer, note)
    rows: list[tuple[shown.Cell, ...]] = []
    for came in session.tape.entry(asked.round).came:
        tensors = session.material.update(asked.round, came.node)
        if tensors is None:
            rows.append((came.node, None, None, None, None, None, came.error or "nothing came"))
            continue
        chosen = matching(asked.layer, tensors) if asked.layer is not None else [*tensors]
        s = summary(torch.cat([tensors[name].reshape(-1).float() for name in chosen]), bins=1)
        rows.append((came.node, s.norm, s.min, s.max, s.nan, s.inf, "" if came.used else "left out"))
    where = "" if asked.layer is None else f", {asked.layer}"
    columns = ("client", "norm", "min", "max", "NaN", "Inf", "")
    return shown.table(f"updates of round {asked.round}{where}", columns, rows)


def _there(found: Tensors | None, asked: Asked) -> Tensors:
    if found is None:
        raise ConfigError(f"Nothing of use came from {asked.node} in round {asked.round}:  clients  says why.")
    return found


def loss(session: Session, asked: Asked) -> Shown:
    """Of a client's local steps, as recorded; else of the global model, over the rounds."""
    if asked.node is None:
        return metric(session, replace(asked, rest=("loss",)))
    losses = losses_of(session.material.came(asked.round, asked.node)).tolist()
    if not losses:
        raise ConfigError(f"The tape has no losses of {asked.node} in round {asked.round}.")
    title = f"loss of {asked.node}, round {asked.round}"
    note = ""
    if session.node == asked.node:
        step = session.step_of(asked.node)
        note = f"Step {step}: {losses[step]!r}." if step < len(losses) else ""
    return shown.series(title, range(len(losses)), {"loss": losses}, x_name="local step", y_name="loss", note=note)


def metric(session: Session, asked: Asked) -> Shown:
    """One over the rounds, from the store or the tape; without a name, all of this round."""
    recorded = {number: session.tape.entry(number).metrics for number in session.tape.rounds}
    if not asked.rest:
        values = _of_round(session, asked)
        return shown.table(_title("metrics", asked), ("metric", "value"), sorted(values.items()))
    name = asked.rest[0]
    rounds, values_of = session.history.series(name, asked.node)
    if not rounds and asked.node is None:
        rounds = [number for number, told in recorded.items() if name in told]
        values_of = [_number(recorded[number][name]) for number in rounds]
    if not rounds:
        everyone = _everyone(session, name)
        if everyone is not None and asked.node is None:
            return everyone
        known = {*_of_round(session, asked), *(n for told in recorded.values() for n in told)}
        whose = f"metric of {asked.node}" if asked.node else "metric"
        raise ConfigError(unknown(whose, name, known))
    title = f"{name} of {asked.node}" if asked.node else name
    return shown.series(title, rounds, {asked.node or name: values_of}, y_name=name)


def _everyone(session: Session, name: str) -> Shown | None:
    """A metric that only clients have: a line for each."""
    found = {node: session.history.series(name, node) for node in session.nodes}
    rounds = sorted({number for numbers, _ in found.values() for number in numbers})
    if not rounds:
        return None
    lines = {}
    for node, (numbers, values) in found.items():
        by_round = dict(zip(numbers, values, strict=True))
        if by_round:
            lines[node] = [by_round.get(number) for number in rounds]
    return shown.series(f"{name} of each client", rounds, lines, y_name=name)


def _of_round(session: Session, asked: Asked) -> dict[str, float | None]:
    values: dict[str, float | None] = {}
    for name in session.metric_names():
        found = dict(zip(*session.history.series(name, asked.node), strict=True))
        if asked.round in found:
            values[name] = found[asked.round]
    if asked.node is None:
        values |= session.tape.entry(asked.round).metrics
    return values


def _title(what: str, asked: Asked) -> str:
    return f"{what} of round {asked.round}" + (f", {asked.node}" if asked.node else "")


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def batch(session: Session, asked: Asked) -> Shown:
    """The samples of a client's step: which of its own they are, and their labels."""
    node = _client(asked, "batch")
    step = session.at(node)
    x, y = session.material.trace(asked.round, node, step.number).batch(step.number)
    s = summary(x, bins=1)
    counts = Counter(int(label) for label in y.reshape(-1))
    rows = [(label, count, count / max(1, y.numel())) for label, count in sorted(counts.items())]
    odd = f", NaN {s.nan}, Inf {s.inf}" if s.nan or s.inf else ""
    own = " ".join(str(int(row)) for row in step.rows[:FEW]) + (" ..." if len(y) > FEW else "")
    note = (
        f"{len(y)} samples of shape {'×'.join(map(str, s.shape[1:]))}, values {shown.figure(s.min)} to "
        f"{shown.figure(s.max)}{odd}. Of its own samples, these: {own}"
    )
    return shown.table(
        f"batch of {node}, round {asked.round}, step {step.number}", ("label", "samples", "share"), rows, note
    )


def state(session: Session, asked: Asked) -> Shown:
    """All that is known before the round: the model, and what the server remembers besides."""
    held = session.material.state(asked.round)
    title = f"state at the beginning of round {asked.round}"
    if asked.rest:
        name = asked.rest[0]
        if name not in held:
            raise ConfigError(unknown("part of the state", name, held))
        return _tensors(f"{title}, {name}", held[name], asked.layer)
    if asked.layer is not None:
        return _tensors(title, held["model"], asked.layer)
    marks = session.tape.marks(asked.round)
    rows: list[tuple[shown.Cell, ...]] = []
    for name, tensors in held.items():
        count = sum(t.numel() for t in tensors.values())
        norm = float(sum(summary(t, bins=1).norm ** 2 for t in tensors.values()) ** 0.5)
        rows.append((name, len(tensors), count, norm, marks[name].digest if name in marks else None))
    return shown.table(title, ("part", "tensors", "values", "norm", "digest"), rows, session.how(asked.round))


NOUNS: Mapping[str, Callable[[Session, Asked], Shown]] = {
    "gradient": gradient,
    "weight": weight,
    "update": update,
    "loss": loss,
    "metric": metric,
    "batch": batch,
    "state": state,
}
