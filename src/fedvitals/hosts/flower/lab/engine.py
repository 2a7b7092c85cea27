# SPDX-License-Identifier: Apache-2.0
"""The lab's engine on Flower's nodes: tasks are sent as messages, and updates return in the order of the tasks.

Client `c7` trains on node 7 modulo the number of nodes, by sorted node ids; a group that exchanges after each iteration
trains as a whole on its first member's node. All work of a node in a round is one message, since in a deployment each
message starts a process. The model is tested here. Nodes train bitwise identically to the engine «sequential».
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from flwr.app import Message, MessageType

from fedvitals.errors import ConfigError, RecordError
from fedvitals.hosts.flower.lab.messages import arrays_by_state, read_reply, write_request
from fedvitals.lab.aggregators.drift import DriftCorrection
from fedvitals.lab.engines.engine import FLOWER, Engine
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Task, Update
from fedvitals.lab.experiment import Experiment, read
from fedvitals.measurements import places_of
from fedvitals.protocols import Observer
from fedvitals.transport.sender import quoted
from fedvitals.transport.wire.payload import decode

NODE_WAIT_SECONDS = 120.0  # seconds to wait for the nodes
TIMEOUT = 3600.0  # seconds for one round's answers
FIRST_LOOK, LAST_LOOK = 0.02, 1.0  # seconds between two polls for answers, increasing

NodeReply = tuple[list[Update], bytes]


class FlowerEngine:
    """Trains through a grid. `nodes`: how many to wait for before the first round; `say` receives texts for people."""

    name = FLOWER
    device = torch.device("cpu")  # models are sent as bytes

    def __init__(
        self,
        site: Site,
        grid: Any,
        *,
        nodes: int = 1,
        timeout: float = TIMEOUT,
        patience: float = NODE_WAIT_SECONDS,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.site, self._grid = site, grid
        self._text = experiment_text(site.experiment)
        self._wanted, self._timeout, self._patience, self._say = nodes, timeout, patience, say
        self._place = {node: place for place, node in enumerate(site.experiment.nodes)}
        self._owing: dict[str, int] = {}  # nodes that have not answered in time, by message
        self._here = Engine(site, "sequential")
        self.evaluate, self.evaluate_locally = self._here.evaluate, self._here.evaluate_locally

    def train(
        self, tasks: Sequence[Task], observer: Observer, absorb: Callable[[bytes], None] | None = None
    ) -> Iterator[list[Update]]:
        """Yield the updates of each task, like `Engine.train`.

        A node that fails, or does not reply, is an error of its clients.
        """
        nodes, absorb = self._nodes(), absorb or observer.absorb
        shares: dict[int, list[Task]] = {}
        for task in tasks:
            shares.setdefault(nodes[self._place[task.nodes[0]] % len(nodes)], []).append(task)
        arrays, watcher = arrays_by_state([task.start for task in tasks]), observer.for_worker()
        messages = [
            Message(
                content=write_request(share, self._text, watcher, arrays),
                dst_node_id=node,
                message_type=MessageType.TRAIN,
                group_id=str(share[0].round),
            )
            for node, share in shares.items()
        ]
        replies = self._exchange(messages)
        updates_by_node: dict[int, Iterator[Update]] = {}
        for node, share in shares.items():
            updates, payload = self._read(node, share, replies.get(node))
            if self._may_tell(payload, share, observer):
                absorb(payload)
            updates_by_node[node] = iter(updates)
        of_task = {id(task): node for node, share in shares.items() for task in share}
        for task in tasks:
            yield [next(updates_by_node[of_task[id(task)]]) for _ in task.nodes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._here.close()

    # -- nodes and messages -------------------------------------------------------------------------------------------

    def _nodes(self) -> list[int]:
        """Return the ids of the nodes that can be asked now.

        Nodes that still owe a reply are avoided while there are others.
        """
        if self._owing:
            for reply in self._grid.pull_messages([*self._owing]):
                self._owing.pop(reply.metadata.reply_to_message_id, None)
        began, reported = time.monotonic(), -1
        while True:
            connected = sorted(self._grid.get_node_ids())
            if len(connected) >= self._wanted:
                break
            if len(connected) != reported:
                reported = len(connected)
                self._say(f"waiting for {self._wanted} SuperNodes, {reported} connected")
            if time.monotonic() - began > self._patience:
                raise ConfigError(
                    f"Waited {self._patience:.0f} s for {self._wanted} SuperNodes, and {len(connected)} are connected. "
                    "Start the others, or ask for fewer with --workers."
                )
            time.sleep(LAST_LOOK)
        self._wanted = 1  # once training has begun, it continues with the remaining nodes
        return [node for node in connected if node not in self._owing.values()] or connected

    def _exchange(self, messages: Sequence[Message]) -> dict[int, Message]:
        """Send messages and return the nodes' replies; nodes that do not reply in time have none."""
        self._grid.push_messages(messages)
        waiting = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        replies: dict[int, Message] = {}
        ends, pause = time.monotonic() + self._timeout, FIRST_LOOK
        while waiting and time.monotonic() < ends:
            for reply in self._grid.pull_messages([*waiting]):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    replies[node] = reply
            if waiting:
                time.sleep(pause)
                pause = min(LAST_LOOK, pause * 1.5)
        self._owing |= waiting
        return replies

    def _read(self, node: int, tasks: Sequence[Task], reply: Message | None) -> NodeReply:
        if reply is None:
            return _failed(tasks, f"The SuperNode {node} did not answer within {self._timeout:.0f} s."), b""
        if reply.has_error():
            error = reply.error
            return _failed(tasks, f"The SuperNode {node} failed (code {error.code}): {error.reason}"), b""
        try:
            return read_reply(reply.content, tasks, self.site.layout.size)
        except RecordError as error:
            return _failed(tasks, f"The answer of the SuperNode {node} cannot be used. {error}"), b""

    def _may_tell(self, payload: bytes, tasks: Sequence[Task], observer: Observer) -> bool:
        """Return whether the telemetry only concerns the clients that were asked there, each in its own group."""
        groups: dict[str | None, str | None] = {node: task.group for task in tasks for node in task.nodes}
        groups[None] = None
        try:
            places = [place for sent in decode(payload) for place in places_of(sent)] if payload else []
        except RecordError:
            return True  # the observer that absorbs it reports the error
        strange = next((place.node for place in places if place.node not in groups), None)
        text = f"Telemetry told of {quoted(strange)}, whose training was asked of another node."
        moved = next((place for place in places if place.group not in (None, groups.get(place.node))), None)
        if strange is None and moved is not None:
            text = (
                f"Telemetry put {quoted(moved.node)} into the group {quoted(moved.group)}, to which it does not belong."
            )
        refused = strange is not None or moved is not None
        for task in tasks if refused else ():
            observer.event("warning", "telemetry.refused", text, node=task.nodes[0])
        return not refused


def experiment_text(experiment: Experiment) -> str:
    """Return the experiment as TOML, which is all that nodes receive of it. Raises ConfigError if it cannot be sent."""
    if experiment.local.keep_optimizer:
        raise ConfigError(
            "Optimisers that are kept over the rounds stay in one process, and Flower starts processes anew: "
            "keep_optimizer needs engine='stacked'."
        )
    if experiment.parameters is not None and experiment.parameters.at_home:
        raise ConfigError("What clients keep at home would be lost with Flower's processes: use another engine.")
    if isinstance(experiment.aggregator, DriftCorrection):
        raise ConfigError(
            "The aggregators scaffold and feddyn shift the gradients of each client, which Flower's messages do not "
            "carry: use another engine."
        )
    text = experiment.to_toml()
    if read(text) != experiment:
        raise ConfigError("The experiment is not the same once it is written as TOML: use another engine for it.")
    return text


def _failed(tasks: Iterable[Task], error: str) -> list[Update]:
    """Return the updates of failed clients, as for a worker process that died."""
    return [
        Update(node, task.start, task.start, 0, task.group, error=error, error_type="WorkerDied")
        for task in tasks
        for node in task.nodes
    ]
