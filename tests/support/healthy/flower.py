# SPDX-License-Identifier: Apache-2.0
"""Healthy Flower apps on which detectors were once wrong: compressed replies, and two evaluations side by side."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import fedvitals as fv
from support.healthy.loops import CLIENTS, blobs, classifier, parts, train


def mixed_evaluation(monitor: fv.Monitor, seed: int, *, better: str) -> None:
    """Clients evaluate in every round, the server in every third, on data that one of the two knows better."""
    from flwr.app import Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg

    from support.flower import federation as hand

    stream = torch.Generator().manual_seed(seed)
    levels = {"server": 0.4, "clients": 1.0} if better == "server" else {"server": 1.2, "clients": 0.4}
    noise = 0.02 * torch.rand(1000, generator=stream)
    place = itertools.count()

    def measured(source: str, number: int) -> dict[str, float]:
        loss = levels[source] * 0.97**number + float(noise[next(place) % 1000])
        return {"loss": loss, "accuracy": max(0.1, 1 - loss / 1.5)}

    def evaluate(message: Any, _: Any) -> Any:
        told = measured("clients", int(message.content["config"]["server-round"]))
        metrics = MetricRecord({"eval_loss": told["loss"], "eval_acc": told["accuracy"], "num-examples": 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def central(number: int, _: Any) -> Any:
        return MetricRecord(measured("server", number)) if number % 3 == 0 else None

    app = hand.client_app(fv.flower.client_mod(), evaluate=evaluate)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    hand.federate(FedAvg(), app, monitor, nodes=6, rounds=24, evaluate_fn=central, run_id=next(hand.RUNS))


def half_arrays(values: Any, _: Any) -> Any:
    return values.astype("float16")


def coarse_arrays(values: Any, _: Any) -> Any:
    """The state by whole numbers from −127 to 127 and a scale, turned back to float32."""
    step = max(float(abs(values).max()) / 127, 1e-12)
    return ((values / step).round() * step).astype("float32")


def pruned_arrays(values: Any, _: Any) -> Any:
    """Without the smallest third of the weights."""
    limit = sorted(abs(values).ravel().tolist())[values.size // 3]
    return values * (abs(values) >= limit)


def large_changes(values: Any, start: Any) -> Any:
    """The largest tenth of what changed; the rest as it was."""
    change = values - start
    limit = sorted(abs(change).ravel().tolist())[-max(1, change.size // 10)]
    return start + change * (abs(change) >= limit)


FLOWER_COMPRESSIONS = {
    "fp16": half_arrays,
    "int8": coarse_arrays,
    "pruning": pruned_arrays,
    "top-k": large_changes,
}


def compressed_flower(monitor: fv.Monitor, seed: int, *, compress: Callable[..., Any], privacy: int) -> None:
    """A Flower app whose clients train with torch; a mod of the user's compresses the arrays of each reply."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg

    from support.flower import federation as hand

    data = [*parts(*blobs(seed)).values()]

    def learn(message: Any, context: Any) -> Any:
        model = classifier()
        state = {name: tensor.float() for name, tensor in message.content["arrays"].to_torch_state_dict().items()}
        model.load_state_dict(state)
        x, y = data[context.node_id - hand.FIRST]
        with fv.watch(model, data=[(x, y)], loss=functional.cross_entropy):
            train(model, x, y, functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
        metrics = MetricRecord({"num-examples": len(x)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    def compressing(message: Any, context: Any, call_next: Any) -> Any:
        reply = call_next(message, context)
        if reply.metadata.message_type.startswith("train"):
            start = message.content["arrays"]
            arrays = {n: Array(compress(a.numpy(), start[n].numpy())) for n, a in reply.content["arrays"].items()}
            reply.content["arrays"] = ArrayRecord(arrays)
        return reply

    app = hand.client_app(fv.flower.client_mod(privacy=privacy), compressing, train=learn)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    arrays = ArrayRecord(classifier().state_dict())
    hand.federate(FedAvg(), app, monitor, nodes=CLIENTS, rounds=12, arrays=arrays, run_id=next(hand.RUNS))
