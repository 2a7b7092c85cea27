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
from fedvitals.replay.debugger.debugger_output import (
    Cell,
    DebuggerOutput,
    format_cell,
    series_output,
    summarize,
    table_output,
    tensor_output,
)
from fedvitals.replay.player.states import required
from fedvitals.replay.tape import gradients
from fedvitals.replay.tape.digests import Tensors
from fedvitals.replay.tape.journal import round_ranges
from fedvitals.replay.tape.retention import losses_of

if TYPE_CHECKING:
    from fedvitals.replay.debugger.session import Session

LAYER_COLUMNS = ("layer", "shape", "norm", "mean", "std", "min", "max", "NaN", "Inf", "zeros")

SAMPLES_NAMED = 12  # samples of a batch that are named


@dataclass(frozen=True, slots=True)
class PrintRequest:
    """What is to be printed, with the session's place filled in."""

    round: int
    node: str | None
    layer: str | None
    rest: tuple[str, ...] = ()


def print_words(session: Session, words: Sequence[str]) -> DebuggerOutput:
    """Return the output that the words name, such as «update c7»."""
    if not words:
        raise ConfigError(f"Print what? {', '.join(NOUNS)}; for example:  print weight, print update c7.")
    noun, *rest = words
    singular = noun if noun in NOUNS else noun.removesuffix("es" if noun == "batches" else "s")
    if singular in NOUNS:
        return NOUNS[singular](session, parse_request(session, rest, free=singular in ("metric", "state")))
    if noun in session.layers or any(name.startswith(f"{noun}.") for name in session.layers):
        raise ConfigError(f"'{noun}' is a layer. Of what?  print weight {noun}, print gradient {noun}.")
    raise ConfigError(unknown("thing to print", noun, NOUNS))


def parse_request(session: Session, words: Sequence[str], *, free: bool) -> PrintRequest:
    """Return the request of the words after the noun. `free`: unknown words are kept instead of refused."""
    node, layer, rest = session.node, None, []
    nodes = session.nodes
    for word in words:
        if word in nodes:
            node = word
        elif matching_layers(word, session.layers):
            layer = word
        elif free:
            rest.append(word)
        else:
            raise ConfigError(unknown("layer or client", word, [*session.layers, *nodes]))
    return PrintRequest(session.round, node, layer, tuple(rest))


def matching_layers(word: str, layers: Iterable[str]) -> list[str]:
    """Return a layer by its name, or all tensors of a module by the module's name."""
    names, module = [*layers], word.rstrip(".")
    return [word] if word in names else [name for name in names if name.startswith(f"{module}.")]


def required_layers(word: str, tensors: Tensors) -> list[str]:
    """Return the layers that a word matches. Raises ConfigError if there is none."""
    names = matching_layers(word, tensors)
    if not names:
        raise ConfigError(f"There is nothing of '{word}' here. There is: {', '.join(tensors)}.")
    return names


def _tensors(title: str, tensors: Tensors, layer: str | None, note: str = "") -> DebuggerOutput:
    """Show one layer as a tensor, or all of them as a table."""
    if layer is None:
        rows = []
        for name, tensor in tensors.items():
            s = summarize(tensor, bins=1)
            shape = "×".join(map(str, s.shape))
            rows.append((name, shape, s.norm, s.mean, s.std, s.min, s.max, s.nan, s.inf, s.zeros))
        return table_output(title, LAYER_COLUMNS, rows, note)
    names = required_layers(layer, tensors)
    if len(names) > 1:
        note = " ".join([note, f"Also: {', '.join(names[1:])}."]).strip()
    return tensor_output(f"{title}, {names[0]}", tensors[names[0]], note)


def _client(request: PrintRequest, what: str) -> str:
    if request.node is None:
        raise ConfigError(f"A {what} is a client's: name one (print {what} c7), or go into it first (into c7).")
    return request.node


def gradient(session: Session, request: PrintRequest) -> DebuggerOutput:
    """Show the gradient of a client's step, as its optimiser gets it."""
    node = _client(request, "gradient")
    if session.tape.setting.host != "lab":
        return _recorded_gradient(session, request, node)
    step, note = session.at(node), session.exactness(node)
    title = f"gradient of {node}, round {request.round}, step {step.number}"
    return _tensors(title, step.gradients or {}, request.layer, note)


def _recorded_gradient(session: Session, request: PrintRequest, node: str) -> DebuggerOutput:
    """Show a gradient from the tape, for hosts whose steps cannot be run again here."""
    folder = session.tape.folder
    recorded = gradients.recorded_gradients(folder)
    steps = [gradient.step for gradient in recorded if (gradient.round, gradient.node) == (request.round, node)]
    if not steps:
        raise ConfigError(
            f"The tape has no gradients of {node} in round {request.round}. They are kept on request: "
            "fv.Tape().gradients(nodes=[...]) among the probes, at privacy level 4."
        )
    tensors = gradients.read_gradient(folder, request.round, node, steps[0]) or {}
    note = f"From the tape, which has steps {round_ranges(steps)}."
    return _tensors(f"gradient of {node}, round {request.round}, step {steps[0]}", tensors, request.layer, note)


def weight(session: Session, request: PrintRequest) -> DebuggerOutput:
    """Show the weights of the client that the session is in, before the step; else those of the global model."""
    if request.node is not None and session.node == request.node:
        step = session.at(request.node)
        title = f"weights of {request.node}, round {request.round}, before step {step.number}"
        return _tensors(title, step.weights or {}, request.layer, session.exactness(request.node))
    if request.node is not None:
        sent = required(session.states.sent(request.round, request.node), request.round, request.node)
        return _tensors(f"weights that {request.node} sent in round {request.round}", sent, request.layer)
    model = session.states.model(request.round)
    return _tensors(f"weights at the beginning of round {request.round}", model, request.layer)


def update(session: Session, request: PrintRequest) -> DebuggerOutput:
    """Show what a client changed; without a client, a table of all clients of the round."""
    if request.node is not None:
        own = session.states.required_update(request.round, request.node)
        note = "What it sent, less what it was given."
        return _tensors(f"update of {request.node}, round {request.round}", own, request.layer, note)
    rows: list[tuple[Cell, ...]] = []
    for came in session.tape.entry(request.round).came:
        tensors = session.states.update(request.round, came.node)
        if tensors is None:
            rows.append((came.node, None, None, None, None, None, came.error or "nothing came"))
            continue
        chosen = matching_layers(request.layer, tensors) if request.layer is not None else [*tensors]
        s = summarize(torch.cat([tensors[name].reshape(-1).float() for name in chosen]), bins=1)
        rows.append((came.node, s.norm, s.min, s.max, s.nan, s.inf, "" if came.used else "left out"))
    where = "" if request.layer is None else f", {request.layer}"
    columns = ("client", "norm", "min", "max", "NaN", "Inf", "")
    return table_output(f"updates of round {request.round}{where}", columns, rows)


def loss(session: Session, request: PrintRequest) -> DebuggerOutput:
    """Show the recorded losses of a client's local steps; without a client, the global model's loss over the rounds."""
    if request.node is None:
        return metric(session, replace(request, rest=("loss",)))
    losses = losses_of(session.states.reply_of(request.round, request.node)).tolist()
    if not losses:
        raise ConfigError(f"The tape has no losses of {request.node} in round {request.round}.")
    title = f"loss of {request.node}, round {request.round}"
    note = ""
    if session.node == request.node:
        step = session.step_of(request.node)
        note = f"Step {step}: {losses[step]!r}." if step < len(losses) else ""
    return series_output(title, range(len(losses)), {"loss": losses}, x_name="local step", y_name="loss", note=note)


def metric(session: Session, request: PrintRequest) -> DebuggerOutput:
    """Show a metric over the rounds, from the store or the tape; without a name, all metrics of this round."""
    recorded = {r: session.tape.entry(r).measured_metrics() for r in session.tape.rounds}
    if not request.rest:
        values = _metrics_of_round(session, request)
        title = f"metrics of round {request.round}" + (f", {request.node}" if request.node else "")
        return table_output(title, ("metric", "value"), sorted(values.items()))
    name = request.rest[0]
    rounds, values_of = session.history.series(name, request.node)
    if not rounds and request.node is None:
        rounds = [round_index for round_index, metrics in recorded.items() if name in metrics]
        values_of = [recorded[round_index][name] for round_index in rounds]
    if not rounds:
        everyone = _metric_of_each_client(session, name)
        if everyone is not None and request.node is None:
            return everyone
        known = {*_metrics_of_round(session, request), *(n for metrics in recorded.values() for n in metrics)}
        whose = f"metric of {request.node}" if request.node else "metric"
        raise ConfigError(unknown(whose, name, known))
    title = f"{name} of {request.node}" if request.node else name
    return series_output(title, rounds, {request.node or name: values_of}, y_name=name)


def _metric_of_each_client(session: Session, name: str) -> DebuggerOutput | None:
    """Show a metric that only clients have: one line each; None if there is no value."""
    series_by_node = {node: session.history.series(name, node) for node in session.nodes}
    rounds = sorted({round_index for numbers, _ in series_by_node.values() for round_index in numbers})
    if not rounds:
        return None
    lines = {}
    for node, (numbers, values) in series_by_node.items():
        by_round = dict(zip(numbers, values, strict=True))
        if by_round:
            lines[node] = [by_round.get(round_index) for round_index in rounds]
    return series_output(f"{name} of each client", rounds, lines, y_name=name)


def _metrics_of_round(session: Session, request: PrintRequest) -> dict[str, float | None]:
    values: dict[str, float | None] = {}
    for name in session.metric_names():
        by_round = dict(zip(*session.history.series(name, request.node), strict=True))
        if request.round in by_round:
            values[name] = by_round[request.round]
    if request.node is None:
        values |= session.tape.entry(request.round).metrics
    return values


def batch(session: Session, request: PrintRequest) -> DebuggerOutput:
    """Show the samples of a client's step: which of its own they are, and their labels."""
    node = _client(request, "batch")
    step = session.at(node)
    x, y = session.states.trace(request.round, node, step.number).batch(step.number)
    s = summarize(x, bins=1)
    counts = Counter(int(label) for label in y.reshape(-1))
    rows = [(label, count, count / max(1, y.numel())) for label, count in sorted(counts.items())]
    odd = f", NaN {s.nan}, Inf {s.inf}" if s.nan or s.inf else ""
    own = " ".join(str(int(row)) for row in step.rows[:SAMPLES_NAMED]) + (" ..." if len(y) > SAMPLES_NAMED else "")
    note = (
        f"{len(y)} samples of shape {'×'.join(map(str, s.shape[1:]))}, values {format_cell(s.min)} to "
        f"{format_cell(s.max)}{odd}. Of its own samples, these: {own}"
    )
    return table_output(
        f"batch of {node}, round {request.round}, step {step.number}", ("label", "samples", "share"), rows, note
    )


def state(session: Session, request: PrintRequest) -> DebuggerOutput:
    """Show the state before the round: the model, and what else the server remembers."""
    held = session.states.state(request.round)
    title = f"state at the beginning of round {request.round}"
    if request.rest:
        name = request.rest[0]
        if name not in held:
            raise ConfigError(unknown("part of the state", name, held))
        return _tensors(f"{title}, {name}", held[name], request.layer)
    if request.layer is not None:
        return _tensors(title, held["model"], request.layer)
    marks = session.tape.marks(request.round)
    rows: list[tuple[Cell, ...]] = []
    for name, tensors in held.items():
        count = sum(t.numel() for t in tensors.values())
        norm = float(sum(summarize(t, bins=1).norm ** 2 for t in tensors.values()) ** 0.5)
        rows.append((name, len(tensors), count, norm, marks[name].digest if name in marks else None))
    return table_output(title, ("part", "tensors", "values", "norm", "digest"), rows, session.how(request.round))


NOUNS: Mapping[str, Callable[[Session, PrintRequest], DebuggerOutput]] = {
    function.__name__: function for function in (gradient, weight, update, loss, metric, batch, state)
}
