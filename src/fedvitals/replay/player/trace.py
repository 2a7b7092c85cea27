# SPDX-License-Identifier: Apache-2.0
"""Trace one client's local training of one round, step by step: the round is run again in this process and watched.

The recorded engine is used, and the client's update is compared with the tape's digest: `exact` says whether the trace
is, to the last bit, what happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.engines.site import Site
from fedvitals.lab.federation import ServerState
from fedvitals.protocols import Message, NullObserver, WorkerObserver
from fedvitals.replay.player.player import PlaybackObserver, Player
from fedvitals.replay.tape.digests import Tensors, state_digest_of
from fedvitals.replay.tape.reader import TapeReader
from fedvitals.stack import Stack

MEMORY = 512 << 20  # bytes of weights and gradients


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One local step. `weights`: before it. `gradients`: as the optimiser gets them, after clipping and injected
    faults.

    Both are None where they were not kept. `rows`: which of the client's own samples make up the batch.
    """

    number: int
    loss: float | None
    weights: Tensors | None
    gradients: Tensors | None
    rows: Tensor


@dataclass
class ClientTrace:
    """A client's local training in one round."""

    node: str
    round: int
    steps: list[TracedStep] = field(default_factory=list)
    start: Tensors | None = None  # the model as it was handed out
    message: Message | None = None  # what arrived in the end
    exact: bool | None = None  # whether that has the recorded bits; None: there is nothing to compare with
    samples: tuple[Tensor, Tensor] | None = None  # the client's own, as it trained on them in this round

    @property
    def kept(self) -> range:
        """Return the steps whose tensors are kept."""
        numbers = [step.number for step in self.steps if step.weights is not None]
        return range(numbers[0], numbers[-1] + 1) if numbers else range(0)

    @property
    def error(self) -> str | None:
        """Return the error with which the client failed; None if it did not."""
        return None if self.message is None else self.message.error

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of a step."""
        assert self.samples is not None  # noqa: S101 - `trace` gives them
        rows = self.steps[step].rows
        return self.samples[0][rows], self.samples[1][rows]


def trace_client(
    player: Player,
    round_index: int,
    node: str,
    *,
    first: int = 0,
    memory: int = MEMORY,
    begin: tuple[int, ServerState] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> ClientTrace:
    """Run a client's local training again and return its trace.

    Tensors are kept from the step `first` on while they fit into `memory`, at least of one step. `begin`: an earlier
    round and its initial state, if the caller has it already. `on_step` is called before each of the client's optimiser
    steps, for a debugger.
    """
    came = player.tape.entry(round_index).required_reply(node)
    first_round, server = begin if begin is not None else (player.start(round_index), None)
    server = player.stored(first_round) if server is None else server
    room = max(1, memory // max(1, 8 * player.site.layout.size))  # two vectors of float32 for each step
    watcher = _StepWatcher(player.site, node, range(first, first + room), on_step)
    playback = _PlaybackUntilUpdate(player.tape, watcher, round_index, node)
    with contextlib.suppress(_UpdateSent):
        for _ in player.rounds(first_round, round_index, server, examined=False, observer=playback, workers=1):
            pass
    message = playback.sent
    if message is None:
        raise ConfigError(
            f"{node} did not train when round {round_index} was run again: that is not what was recorded."
        )
    if not watcher.seen:
        raise ConfigError(
            f"{node}'s steps in round {round_index} cannot be watched: its telemetry is switched off, by a planted "
            "fault of this experiment. Its update is there:  print update."
        )
    return _assembled(player, watcher, message, came.mark)


def _assembled(player: Player, watcher: _StepWatcher, message: Message, recorded: Any) -> ClientTrace:
    site, node, round_index = player.site, watcher.node, watcher.round
    client_trace = ClientTrace(node, round_index, start=watcher.start, message=message)
    if recorded is not None and message.tensors is not None:
        client_trace.exact = state_digest_of(message.tensors).digest == recorded.digest
    client_trace.samples = site.tensors(node, round_index)
    losses = [] if message.losses is None else [float(loss) for loss in message.losses]
    order = site.order(node, round_index, max(1, watcher.count), watcher.batch, len(client_trace.samples[1]))
    for step in range(watcher.count):
        weights, gradients = watcher.kept.get(step, (None, None))
        loss = losses[step] if step < len(losses) else None
        client_trace.steps.append(TracedStep(step, loss, weights, gradients, order[step]))
    if message.error is not None:
        _drop_idle_steps(client_trace)
    return client_trace


def _drop_idle_steps(client_trace: ClientTrace) -> None:
    """Drop the final steps in which nothing changes: a failed client idles while the others of its stack go on."""
    while len(client_trace.steps) > 1:
        before, last = client_trace.steps[-2].weights, client_trace.steps[-1].weights
        if before is None or last is None or any(not torch.equal(before[k], last[k]) for k in last):
            return
        client_trace.steps.pop()


class _UpdateSent(BaseException):
    """Raised when the client has sent its update, because the rest of the round is not needed."""


class _PlaybackUntilUpdate(PlaybackObserver):
    """Plays up to a client's update of one round."""

    def __init__(self, tape: TapeReader, watcher: _StepWatcher, round_index: int, node: str) -> None:
        super().__init__(tape, watcher)
        self._number, self._node, self._silent = round_index, node, NullObserver()
        self.sent: Message | None = None

    def for_worker(self) -> WorkerObserver:
        """In the rounds before, nobody is watched."""
        return super().for_worker() if self.played.number == self._number else self._silent

    def messages(self, round_index: int, messages: Sequence[Message]) -> None:
        super().messages(round_index, messages)
        if round_index == self._number:
            self.sent = self.played.message(self._node)
            if self.sent is not None:
                raise _UpdateSent

    def begin(self, round_index: int, state: Mapping[str, Tensors], notes: Mapping[str, Any]) -> None:
        super().begin(round_index, state, notes)
        if isinstance(self._watcher, _StepWatcher):
            self._watcher.round = round_index


class _StepWatcher(NullObserver):
    """Copies a client's weights and gradients before each of its steps, for every engine."""

    def __init__(self, site: Site, node: str, wanted: range, on_step: Callable[[int], None] | None) -> None:
        self.site, self.node, self.wanted, self._on_step = site, node, wanted, on_step
        self.round, self.count, self.batch, self.seen = -1, 0, site.experiment.local.step_samples, False
        self.start: Tensors | None = None
        self.kept: dict[int, tuple[Tensors, Tensors]] = {}
        self._hooks: list[Any] = []
        self._stack: Stack | None = None

    def client_begin(self, node: str, model: Any = None, optimizer: Any = None, *_: Any, **__: Any) -> None:
        if node != self.node or self.seen:
            return
        self.seen, self.start = True, _copies(dict(model.named_parameters()) | dict(model.named_buffers()))

        def forward(_module: Any, inputs: tuple[Any, ...]) -> None:
            self.batch = len(inputs[0]) * self.site.experiment.local.accumulate

        def stepping(*_: Any) -> None:
            held = dict(model.named_parameters())
            gradients = {name: p.grad for name, p in held.items() if p.grad is not None}
            self._note(held | dict(model.named_buffers()), gradients)

        if optimizer is None:
            raise ConfigError(f"{node} trains without an optimiser object, so its steps cannot be watched.")
        self._hooks = [model.register_forward_pre_hook(forward), optimizer.register_step_pre_hook(stepping)]

    def client_end(self, node: str, *_: Any) -> None:
        if node == self.node:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def stack_begin(self, stack: Stack) -> None:
        if self.node in stack.nodes and not self.seen:
            self._stack, self.seen = stack, True
            self.start = _copies(self.site.layout.views(stack.states[self._row]))

    def stack_step(self, step: int, gradients: Any, _losses: Any) -> None:
        if self._stack is None or (self._stack.steps is not None and step >= self._stack.steps[self._row]):
            return
        views = self.site.layout.views
        self._note(views(self._stack.states[self._row]), views(gradients[self._row]))

    def stack_end(self, *_: Any) -> None:
        self._stack = None

    @property
    def _row(self) -> int:
        return 0 if self._stack is None else [*self._stack.nodes].index(self.node)

    def _note(self, weights: Tensors, gradients: Tensors) -> None:
        step, self.count = self.count, self.count + 1
        if step in self.wanted:
            self.kept[step] = (_copies(weights), _copies(gradients))
        if self._on_step is not None:
            self._on_step(step)


def _copies(tensors: Tensors) -> dict[str, Tensor]:
    """Return contiguous copies on the CPU: engines may store weights of images in another memory order."""
    return {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
