# SPDX-License-Identifier: Apache-2.0
"""Flower without processes: a grid that calls a real ClientApp itself, by the wire's own bytes, and a small federation.

Each client moves the model a fixed part of the way to a target of its own, so that every number can be foretold.
"""

from __future__ import annotations

import itertools
import random
import threading
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto, recorddict_to_proto
from flwr.serverapp import Grid
from flwr.serverapp import strategy as strategies

import fedvitals as fv
from fedvitals.hosts.flower.reply_envelope import KEY
from fedvitals_studies.flower.process_identity import flower_run

RUN, FIRST = 7, 100  # Flower's run id; the first node's
RUNS = itertools.count(1000)  # more run ids: of one run, a process keeps what it knows
OLDEST = not hasattr(strategies, "FedAvgM")
LAYERS = {"dense.weight": (6, 4), "dense.bias": (4,), "head.weight": (4, 3)}
EXAMPLES = 20


@dataclass
class Late:
    """An answer that is not there before something else is sent."""

    reply: Message


class HandGrid(Grid):
    """What is pushed is answered at once. `fate(request, reply)`: what becomes of a reply; None loses it."""

    def __init__(self, app: Any, nodes: int = 4, *, fate: Any = None, run_id: int = RUN) -> None:
        self.app, self.nodes, self.run_id = app, [FIRST + i for i in range(nodes)], run_id
        self.fate = fate or (lambda _, reply: reply)
        self.node_configs: dict[int, dict[str, Any]] = {}  # of nodes that do not have their number as partition
        self.requests: list[Message] = []  # as the clients got them
        self._ready: dict[str, Message] = {}
        self._later: dict[str, Message] = {}
        self._states = {node: RecordDict() for node in self.nodes}
        self._lock = threading.RLock()  # the older API sends on threads

    @property
    def run(self) -> Any:
        return self  # of which nothing but the id is known

    def set_run(self, run: Any) -> None: ...

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [*self.nodes]

    def push_messages(self, messages: Any) -> list[str]:
        with self._lock:
            self._ready |= self._later
            self._later = {}
            return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = key = str(uuid.uuid4())
        message.metadata.__dict__["_run_id"] = self.run_id
        self.requests.append(carried(message))
        fate = self.fate(message, carried(self._answer(carried(message))))
        if isinstance(fate, Late):
            self._later[key] = fate.reply
        elif fate is not None:
            self._ready[key] = fate
        return key

    def _answer(self, request: Message) -> Message:
        node = request.metadata.dst_node_id
        own = self.node_configs.get(node, {"partition-id": node - FIRST})
        state = self._states.setdefault(node, RecordDict())
        context = Context(run_id=self.run_id, node_id=node, node_config=own, state=state, run_config={})
        try:
            reply = self.app(request, context)
        except Exception as error:  # noqa: BLE001 - as Flower does
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=request)
        return sealed(reply)

    def pull_messages(self, message_ids: Any) -> list[Message]:
        return [self._ready.pop(key) for key in message_ids if key in self._ready]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))


def carried(message: Message) -> Message:
    """As it comes out of the wire at the other end."""
    return message_from_proto(message_to_proto(message))


def sealed(reply: Message) -> Message:
    """With an id, which the SuperLink gives."""
    reply.metadata.__dict__["_message_id"] = str(uuid.uuid4())
    return reply


def keys_and_bytes(content: RecordDict) -> tuple[list[str], bytes]:
    """All that a message holds: its keys in their order, and its bytes."""
    return [*content], recorddict_to_proto(content).SerializeToString(deterministic=True)


# -- a federation -----------------------------------------------------------------------------------------------------


def model(seed: int = 0) -> ArrayRecord:
    stream = np.random.default_rng(seed)
    return ArrayRecord({name: Array(stream.normal(size=s).astype(np.float32)) for name, s in LAYERS.items()})


def numbers(arrays: ArrayRecord) -> dict[str, bytes]:
    return {name: array.numpy().tobytes() for name, array in arrays.items()}


def target(node: int, name: str, shape: Any) -> np.ndarray:
    return np.random.default_rng([node, len(name)]).normal(size=shape).astype(np.float32)


def training(message: Message, context: Context) -> Message:
    arrays = message.content["arrays"]
    learnt, loss = {}, 0.0
    for name, array in arrays.items():
        before = array.numpy()
        way = target(context.node_id, name, before.shape) - before
        learnt[name], loss = Array((before + np.float32(0.3) * way).astype(np.float32)), loss + float((way**2).mean())
    metrics = MetricRecord({"train_loss": loss, "num-examples": EXAMPLES + context.node_id % 5})
    return Message(RecordDict({"arrays": ArrayRecord(learnt), "metrics": metrics}), reply_to=message)


def evaluation(message: Message, context: Context) -> Message:
    last = [*message.content["arrays"].values()][-1].numpy()
    accuracy = 1 / (1 + float(np.abs(last).sum()))
    metrics = MetricRecord({"eval_acc": accuracy, "num-examples": EXAMPLES + context.node_id % 5})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def client_app(*mods: Any, train: Any = training, evaluate: Any = evaluation, train_mods: Any = ()) -> ClientApp:
    app = ClientApp(mods=[*mods])
    app.train(mods=[*train_mods])(train)
    app.evaluate()(evaluate)
    return app


def with_mod(**settings: Any) -> ClientApp:
    return client_app(fv.flower.client_mod(**settings))


@contextmanager
def watched(*, ours_may_fail: bool = False, **settings: Any):
    """A monitor and the sink that keeps its records. What fails on our side fails the test, unless it may."""
    from fedvitals.testing import MemorySink  # imports torch, which a test may do without

    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], **{"machine": False, "detectors": (), **settings}) as monitor:
        yield monitor, sink
    assert ours_may_fail or not sink.events("monitor.error"), sink.events("monitor.error")


def federate(strategy: Any, app: Any, monitor: Any = None, *, nodes: int = 4, rounds: int = 2, **more: Any):
    """Rounds of a strategy, watched if there is a monitor; the same random numbers each time. Result and grid."""
    grid = HandGrid(app, nodes, fate=more.pop("fate", None), run_id=more.pop("run_id", RUN))
    if monitor is not None:
        strategy = fv.flower.attach(strategy, monitor, **more.pop("attach", {}))
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the one that Flower's strategies use
    with flower_run(grid.run_id):
        return strategy.start(grid, more.pop("arrays", None) or model(), num_rounds=rounds, **more), grid


def requests_for(grid: Any, arrays: ArrayRecord) -> list[Message]:
    """What a loop of one's own sends: it says nothing of rounds."""
    content = {"arrays": arrays, "config": ConfigRecord({"rate": 0.1})}
    return [Message(RecordDict(dict(content)), message_type="train", dst_node_id=n) for n in grid.get_node_ids()]


def is_round(request: Message, number: int, phase: str = "train") -> bool:
    told_number = request.content["config"].get("server-round")
    return request.metadata.message_type == phase and told_number == number


def node_of(request: Message) -> str:
    return str(request.metadata.dst_node_id)


def rewritten(change: Any, *, node: str = "101", phase: str = "train"):
    """A fate: the telemetry of one node as `change(record)` makes it, which is what a liar would send."""

    def fate(request: Message, reply: Message) -> Message:
        if node_of(request) == node and request.metadata.message_type == phase and reply.has_content():
            reply.content[KEY] = change(reply.content[KEY])
        return reply

    return fate
