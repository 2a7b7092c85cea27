# SPDX-License-Identifier: Apache-2.0
"""Minimal Flower apps, one for each shape in which people hand over models; none of them knows fedvitals.

`python shaped_apps.py` runs all of them in one process and prints a digest of what came out of each, as JSON: the same,
watched or not. Libraries that are not installed here are represented by the form of the messages that their apps send.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import ServerApp
from flwr.serverapp import strategy as strategies

sys.path.insert(0, str(Path(__file__).parents[2]))  # this file is also run as a program

from fedvitals_studies.flower.process_identity import flower_run
from support.flower.grid import InProcessGrid

NODES = (11, 12, 13, 14)
ROUNDS = 2
Train = Callable[[ArrayRecord, int], tuple[ArrayRecord, dict[str, Any]]]  # a model and a node → a model and metrics
Mod = Callable[..., Message]


@dataclass(frozen=True)
class Shape:
    """An app: its first model, its training, its strategy and its own mods."""

    initial: Callable[[], ArrayRecord]
    train: Train
    strategy: Callable[[], Any] = lambda: strategies.FedAvg(min_available_nodes=len(NODES))
    mods: tuple[Mod, ...] = ()


def data_of(node: int, features: int = 6) -> tuple[Any, Any]:
    stream = np.random.default_rng(node)
    inputs = stream.normal(size=(40, features)).astype(np.float32)
    return inputs, (inputs[:, 0] + 0.3 * stream.normal(size=40) > 0).astype(np.int64)


# -- PyTorch, and what is built on it -------------------------------------------------------------------------------


def network() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def first_weights(build: Callable[[], Any]) -> ArrayRecord:
    import torch

    torch.manual_seed(0)
    return ArrayRecord(build().state_dict())


def torch_training(arrays: ArrayRecord, node: int) -> tuple[ArrayRecord, dict[str, Any]]:
    import torch

    model = network()
    model.load_state_dict(arrays.to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    inputs, labels = map(torch.from_numpy, data_of(node))
    for batch in torch.randperm(40).split(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    return ArrayRecord(model.state_dict()), {"train_loss": loss.item()}


def lightning_module() -> Any:
    """As Lightning's: the network is an attribute, the training step and the optimiser are methods."""
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: Any) -> Any:
            inputs, labels = batch
            return torch.nn.functional.cross_entropy(self.model(inputs), labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    return Module()


def lightning_training(arrays: ArrayRecord, node: int) -> tuple[ArrayRecord, dict[str, Any]]:
    import torch

    module = lightning_module()
    module.load_state_dict(arrays.to_torch_state_dict())
    inputs, labels = map(torch.from_numpy, data_of(node))
    optimizer = module.configure_optimizers()
    for _ in range(3):  # what a Trainer does
        loss = module.training_step((inputs, labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return ArrayRecord(module.state_dict()), {"train_loss": loss.item()}


def language_model() -> Any:
    """As Hugging Face's: embeddings tied to the head, an output object with a loss, and adapters that alone train."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight
            self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))
            self.embed.weight.requires_grad_(requires_grad=False)

        def forward(self, input_ids: Any, labels: Any) -> Any:
            hidden = self.embed(input_ids)
            logits = self.head(hidden + hidden @ self.lora_A.T @ self.lora_B.T)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return types.SimpleNamespace(loss=loss, logits=logits)

    return Model()


def adapters(model: Any) -> OrderedDict[str, Any]:
    return OrderedDict((name, tensor) for name, tensor in model.state_dict().items() if "lora" in name)


def language_training(arrays: ArrayRecord, node: int) -> tuple[ArrayRecord, dict[str, Any]]:
    import torch

    torch.manual_seed(0)  # the base model, which is no part of the messages
    model = language_model()
    model.load_state_dict(arrays.to_torch_state_dict(), strict=False)
    tokens = torch.from_numpy(np.random.default_rng(node).integers(0, 11, (4, 7)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.05)
    for _ in range(3):
        output = model(input_ids=tokens[:, :-1], labels=tokens[:, 1:])
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    return ArrayRecord(adapters(model)), {"train_loss": output.loss.item()}


# -- arrays -----------------------------------------------------------------------------------------------------------


def numpy_training(arrays: ArrayRecord, node: int) -> tuple[ArrayRecord, dict[str, Any]]:
    weights, bias = arrays.to_numpy_ndarrays()
    inputs, labels = data_of(node)
    error = inputs @ weights + bias - labels
    weights, bias = weights - 0.1 * inputs.T @ error / 40, bias - 0.1 * error.mean()
    return ArrayRecord([weights, np.asarray(bias, np.float32)]), {
        "train_loss": float((error**2).mean()),
        "curve": [1.0, 0.5],
    }


def sklearn_training(arrays: ArrayRecord, node: int) -> tuple[ArrayRecord, dict[str, Any]]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    model = LogisticRegression(max_iter=2, warm_start=True)
    inputs, labels = data_of(node)
    model.classes_ = np.array([0, 1])
    model.coef_, model.intercept_ = arrays.to_numpy_ndarrays()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two iterations are not enough
        model.fit(inputs, labels)
    loss = log_loss(labels, model.predict_proba(inputs))
    return ArrayRecord([model.coef_, model.intercept_]), {"train_logloss": float(loss)}


def trees_of(node: int, count: int) -> bytes:
    """A booster of XGBoost as JSON, with the fields that Flower's bagging reads."""
    trees = [{"id": number, "base_weights": [0.1 * node] * (node % 3 + 1)} for number in range(count)]
    model = {
        "gbtree_model_param": {"num_trees": str(count), "num_parallel_tree": "1"},
        "iteration_indptr": [0, *range(1, count + 1)],
        "tree_info": [0] * count,
        "trees": trees,
    }
    return json.dumps({"learner": {"gradient_booster": {"model": model}}}).encode()


def xgboost_training(arrays: ArrayRecord, node: int) -> tuple[ArrayRecord, dict[str, Any]]:
    assert arrays["0"].numpy().dtype == np.uint8
    return ArrayRecord([np.frombuffer(trees_of(node, 1), np.uint8)]), {"train-logloss": 0.5 / node}


def jax_parameters() -> dict[str, Any]:
    stream = np.random.default_rng(5)
    kernel = np.asfortranarray(stream.normal(size=(6, 3)).astype(np.float32))
    return {"params/Dense_0/kernel": kernel, "params/Dense_0/bias": np.zeros(3, np.float32), "scale": np.float32(1.0)}


def jax_training(arrays: ArrayRecord, node: int) -> tuple[ArrayRecord, dict[str, Any]]:
    inputs, _ = data_of(node)
    trained = {}
    for name, array in arrays.items():
        values = array.numpy()
        moved = values - np.float32(0.1) * np.float32(inputs.mean() + node)
        trained[name] = Array(np.asfortranarray(moved) if values.ndim == 2 else np.asarray(moved, np.float32))
    return ArrayRecord(trained), {"loss": float(node)}


# -- mods -------------------------------------------------------------------------------------------------------------


def half_precision_mod(message: Message, context: Context, call_next: Any) -> Message:
    reply = call_next(message, context)
    for record in reply.content.array_records.values():
        for name, array in [*record.items()]:
            record[name] = Array(array.numpy().astype(np.float16).astype(np.float32))
    return reply


def remembering_mod(message: Message, context: Context, call_next: Any) -> Message:
    """Keeps a count in the node's state, and sends it as a record of its own."""
    count = context.state.config_records.get("calls", ConfigRecord({"count": 0}))["count"] + 1
    context.state["calls"] = ConfigRecord({"count": count})
    reply = call_next(message, context)
    reply.content["calls"] = ConfigRecord({"count": count})
    return reply


def answering_mod(message: Message, context: Context, call_next: Any) -> Message:
    """Answers itself in place of one node's handler, with the model as it was."""
    if context.node_id != NODES[0] or message.metadata.message_type != "train":
        return call_next(message, context)
    metrics = MetricRecord({"num-examples": 1, "train_loss": 0.0, "curve": [1.0, 0.5]})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)


def numpy_model() -> ArrayRecord:
    return ArrayRecord([np.zeros(6, np.float32), np.zeros((), np.float32)])


def private_strategy() -> Any:
    kind = strategies.DifferentialPrivacyClientSideFixedClipping
    return kind(strategies.FedAvg(min_available_nodes=len(NODES)), 0.1, 1.0, len(NODES))


SHAPES: dict[str, Shape] = {
    "pytorch": Shape(lambda: first_weights(network), torch_training),
    "lightning": Shape(lambda: first_weights(lightning_module), lightning_training),
    "huggingface": Shape(lambda: ArrayRecord(adapters(language_model())), language_training),
    "numpy": Shape(numpy_model, numpy_training),
    "sklearn": Shape(lambda: ArrayRecord([np.zeros((1, 6)), np.zeros(1)]), sklearn_training),
    "xgboost": Shape(
        lambda: ArrayRecord([np.frombuffer(b"", np.uint8)]),
        xgboost_training,
        lambda: strategies.FedXgbBagging(min_available_nodes=len(NODES)),
    ),
    "jax": Shape(lambda: ArrayRecord({n: Array(np.asarray(v)) for n, v in jax_parameters().items()}), jax_training),
    "dp": Shape(lambda: first_weights(network), torch_training, private_strategy, (fixedclipping_mod,)),
    "mods": Shape(numpy_model, numpy_training, mods=(remembering_mod, answering_mod, half_precision_mod)),
}


def client_of(shape: Shape, mods: Sequence[Mod] = ()) -> ClientApp:
    app = ClientApp(mods=[*mods, *shape.mods])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays, metrics = shape.train(message.content["arrays"], context.node_id)
        numbers = MetricRecord({"num-examples": 40 + context.node_id, **metrics})
        return Message(RecordDict({"arrays": arrays, "metrics": numbers}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        size = sum(len(array.data) for array in message.content["arrays"].values())
        metrics = MetricRecord({"num-examples": 40, "eval_acc": 1 / (1 + size)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def digest_of(arrays: ArrayRecord) -> str:
    written = hashlib.sha256()
    for name, array in arrays.items():
        written.update(name.encode() + array.data)
    return written.hexdigest()


class Grid(InProcessGrid):
    run = types.SimpleNamespace(run_id=7)


def run(name: str, mods: Sequence[Mod] = (), attach: Callable[[Any], Any] = lambda strategy: strategy) -> str:
    """Run a shape as a ServerApp and ClientApps; the digest of its last model and of all metrics. Without arguments it
    has no line of fedvitals.
    """
    shape = SHAPES[name]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - what Flower's noise is drawn from
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1)
    came: dict[str, Any] = {}
    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Context) -> None:
        came["result"] = attach(shape.strategy()).start(grid, shape.initial(), num_rounds=ROUNDS)

    server(Grid(client_of(shape, mods), NODES), Context([*SHAPES].index(name) + 1, 0, {}, RecordDict(), {}))
    result = came["result"]
    metrics = (result.train_metrics_clientapp, result.evaluate_metrics_clientapp)
    kept = json.dumps([{number: dict(own) for number, own in part.items()} for part in metrics])
    return f"{digest_of(result.arrays)} {kept}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with flower_run():
        import torch

        torch.set_num_threads(1)
        sys.stdout.write(json.dumps({name: run(name) for name in SHAPES}) + "\n")
