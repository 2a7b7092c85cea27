# SPDX-License-Identifier: Apache-2.0
"""Healthy trainings of mainstream kinds on which detectors were once wrong, for the suite and as a study of its own.

`python tests/healthy_settings.py [SEEDS] [NAME ...]` prints the warnings and criticals of each setting; there must be
none. Each setting is a function of a monitor and a seed that trains a small federation to its end.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedvitals as fv
from fedvitals import lab
from fedvitals.diagnosis.cases import Case, cases, is_trouble
from fedvitals.diagnosis.examine import examine
from fedvitals.store import MemoryStore

Setting = Callable[[fv.Monitor, int], None]
CLIENTS, ROUNDS, BATCH = 10, 14, 16


def judged(setting: Setting, seed: int = 0, **options: Any) -> list[Case]:
    """Train a setting under a monitor of its own, and return what all detectors say of it, as cases."""
    torch.manual_seed(seed)
    store = MemoryStore()
    options.setdefault("privacy", getattr(setting, "keywords", {}).get("privacy", 3))
    with fv.Monitor(None, sinks=[store], machine=False, detectors=(), **options) as monitor:
        setting(monitor, seed)
    return cases(examine(store.history(monitor.run.id)))


def troubles(found: list[Case]) -> list[str]:
    return [f"{case.severity} {case.issue} {case.place}" for case in found if is_trouble(case)]


# -- compression in the lab -------------------------------------------------------------------------------------------

LAB_COMPRESSIONS = {
    "fp16": lab.fp16(),
    "int8": lab.int8(),
    "top-k": lab.top_k(share=0.1),
    "pruning": lab.pruning(share=0.3),
}
LAB_MODELS = {"mlp": lab.mlp(hidden=[32]), "cnn": lab.cnn()}


def lab_setting(monitor: fv.Monitor, seed: int, *, faults: tuple[Any, ...] = (), **changes: Any) -> None:
    usual: dict[str, Any] = {
        "dataset": "digits",
        "model": LAB_MODELS["mlp"],
        "clients": 12,
        "rounds": ROUNDS,
        "partition": lab.dirichlet(1.0),
        "local": lab.Local(iterations=8, optimizer=lab.sgd(learning_rate=0.1)),
        "seed": seed,
    }
    lab.run(lab.Experiment(**usual | changes, faults=list(faults)), monitor, engine="sequential")


# -- compression by hand, in a plain loop that hands its updates over ----------------------------------------------------


def half(change: Tensor, _: Any) -> Tensor:
    return change.half().float()


def eight_bits(change: Tensor, _: Any) -> Tensor:
    step = (change.abs().max() / 127).clamp_min(1e-12)
    return (change / step).round() * step


def top_values(change: Tensor, residual: dict[str, Tensor]) -> Tensor:
    """The largest twentieth; what is left out is added to the next update (error feedback)."""
    wanted = change + residual.get("rest", torch.zeros_like(change))
    kept = torch.zeros_like(wanted)
    places = wanted.abs().topk(max(1, len(wanted) // 20)).indices
    kept[places] = wanted[places]
    residual["rest"] = wanted - kept
    return kept


def random_mask(change: Tensor, _: Any) -> Tensor:
    return change * (torch.rand_like(change) < 0.2)


def signs(change: Tensor, _: Any) -> Tensor:
    return change.sign() * change.abs().mean()


def clipped_and_noised(change: Tensor, _: Any) -> Tensor:
    clipped = change * min(1.0, 0.5 / float(change.norm()))
    return clipped + 0.1 * 0.5 / len(change) ** 0.5 * torch.randn_like(change)


HAND_COMPRESSIONS = {
    "fp16": half,
    "int8": eight_bits,
    "top-k with error feedback": top_values,
    "random mask": random_mask,
    "sign": signs,
    "clipping and noise": clipped_and_noised,
}


def blobs(seed: int, *, samples: int = 800, features: int = 20, classes: int = 4) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(1000 + seed)
    centres = 1.5 * torch.randn(classes, features, generator=stream)
    labels = torch.randint(0, classes, (samples,), generator=stream)
    return centres[labels] + torch.randn(samples, features, generator=stream), labels


def parts(x: Tensor, y: Tensor, clients: int = CLIENTS) -> dict[str, tuple[Tensor, Tensor]]:
    return {f"c{i}": (x[i::clients], y[i::clients]) for i in range(clients)}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def average(models: list[nn.Module], into: nn.Module) -> None:
    states = [model.state_dict() for model in models]
    into.load_state_dict({name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]})


def compressed_loop(monitor: fv.Monitor, seed: int, compress: Callable[..., Tensor], spoil: Any = None) -> None:
    """FedAvg on updates that each client compresses; `spoil(round, node, change)` may alter what it sends then."""
    x, y = blobs(seed)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
    memories: dict[str, dict[str, Tensor]] = {node: {} for node in parts(x, y)}
    for number in range(ROUNDS):
        with monitor.round(number, model):
            start, sent = flat(model), {}
            for node, (own_x, own_y) in parts(x, y).items():
                local = copy.deepcopy(model)
                with monitor.client(node, local, data=(own_x, own_y), loss=functional.cross_entropy):
                    train(local, own_x, own_y, functional.cross_entropy, torch.optim.SGD(local.parameters(), 0.1))
                change = compress(flat(local) - start, memories[node])
                sent[node] = change if spoil is None else spoil(number, node, change)
            sizes = [p.numel() for p in model.parameters()]
            shapes = [p.shape for p in model.parameters()]
            monitor.updates(
                number,
                {
                    node: [part.view(shape) for part, shape in zip(change.split(sizes), shapes, strict=True)]
                    for node, change in sent.items()
                },
            )
            mean = torch.stack([change.nan_to_num() for change in sent.values()]).mean(0)
            nn.utils.vector_to_parameters(start + mean, model.parameters())
            log_quality(monitor, model, x, y)


def train(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor], optimizer: Any) -> None:
    for batch in torch.randperm(len(x)).split(BATCH):
        optimizer.zero_grad()
        loss(model(x[batch]), y[batch]).backward()
        optimizer.step()


def log_quality(monitor: fv.Monitor, model: nn.Module, x: Tensor, y: Tensor, *, loss: bool = True) -> None:
    with torch.no_grad():
        output = model(x).float()
        monitor.log(accuracy=float((output.argmax(1) == y).float().mean()))
        if loss:
            monitor.log(loss=float(functional.cross_entropy(output, y)))


# -- plain loops ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A plain FedAvg loop: data, model, loss, optimiser, and what is logged after each round."""

    data: Callable[[int], tuple[Tensor, Tensor]]
    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    optimizer: Callable[[Any], Any]
    log: Callable[..., dict[str, float]] = lambda *_: {}
    tells_data: bool = True  # whether clients show their data and loss to the monitor
    rounds: int = ROUNDS

    def __call__(self, monitor: fv.Monitor, seed: int) -> None:
        x, y = self.data(seed)
        model = self.model()
        for number in range(self.rounds):
            with monitor.round(number, model):
                trained = []
                for node, (own_x, own_y) in parts(x, y).items():
                    local = copy.deepcopy(model)
                    own = {"data": (own_x, own_y), "loss": self.loss} if self.tells_data else {}
                    with monitor.client(node, local, **own):
                        learning = [p for p in local.parameters() if p.requires_grad]
                        train(local, own_x, own_y, self.loss, self.optimizer(learning))
                    trained.append(local)
                average(trained, model)
                with torch.no_grad():
                    monitor.log(self.log(model, x, y))


def numbers(seed: int, *, scale: float = 1.0, targets: int = 1) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(2000 + seed)
    x = torch.randn(600, 10, generator=stream)
    y = x @ torch.randn(10, targets, generator=stream) + 0.1 * torch.randn(600, targets, generator=stream)
    return x, scale * (y - y.mean()) / y.std()


def regressor(targets: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, targets))


def sgd(rate: float) -> Callable[[Any], Any]:
    return lambda parameters: torch.optim.SGD(parameters, rate)


def adam(rate: float) -> Callable[[Any], Any]:
    return lambda parameters: torch.optim.Adam(parameters, rate)


def log_loss(loss: Callable[..., Tensor]) -> Callable[..., dict[str, float]]:
    return lambda model, x, y: {"loss": float(loss(model(x), y))}


def log_accuracy(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    return {"accuracy": float((model(x).argmax(1) == y).float().mean())}


def log_both(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    return log_accuracy(model, x, y) | log_loss(functional.cross_entropy)(model, x, y)


def regression(scale: float, loss: Callable[..., Tensor], rate: float, targets: int = 1) -> Task:
    data = functools.partial(numbers, scale=scale, targets=targets)
    return Task(data, functools.partial(regressor, targets), loss, adam(rate), log_loss(loss))


class TwoHeads(nn.Module):
    """A classifier and a regression on one body; `classes_last`: which of the heads comes last."""

    def __init__(self, *, classes_last: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 32), nn.ReLU())
        heads = {"classes": nn.Linear(32, 4), "size": nn.Linear(32, 1)}
        for name in sorted(heads, reverse=classes_last):
            self.add_module(name, heads[name])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.get_submodule("classes")(hidden), self.get_submodule("size")(hidden)[:, 0]


def two_targets(seed: int) -> tuple[Tensor, Tensor]:
    x, y = blobs(seed)
    return x, torch.stack([y.float(), 3 * x.sum(1)], 1)


def both_losses(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs[0], targets[:, 0].long()) + functional.mse_loss(outputs[1], targets[:, 1])


def log_two(model: nn.Module, x: Tensor, targets: Tensor) -> dict[str, float]:
    outputs = model(x)
    accuracy = (outputs[0].argmax(1) == targets[:, 0]).float().mean()
    return {"accuracy": float(accuracy), "loss": float(both_losses(outputs, targets))}


def many_labels(seed: int) -> tuple[Tensor, Tensor]:
    x, _ = numbers(seed)
    stream = torch.Generator().manual_seed(seed)
    return x, (x @ torch.randn(10, 6, generator=stream) > 0).float()


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    steps = torch.randint(1, 4, (400, 1), generator=torch.Generator().manual_seed(seed))
    text = (torch.arange(13)[None] * steps) % 12
    return text[:, :-1], text[:, 1:]


class Language(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.memory = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, 12)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.memory(self.embedding(text))[0]).flatten(0, 1).unflatten(0, text.shape)


def next_token(outputs: Tensor, text: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), text.flatten())


def summed_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, reduction="sum")


class Adapter(nn.Module):
    """A frozen layer and a low-rank correction that begins at 0 (LoRA), with names as peft has them."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(requires_grad=False)
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return result


def adapted(*, head: bool) -> nn.Module:
    """Adapters on a frozen random backbone; `head`: whether the last layer is trained as a whole."""
    last: nn.Module = nn.Linear(32, 4) if head else Adapter(nn.Linear(32, 4))
    return nn.Sequential(Adapter(nn.Linear(20, 32)), nn.ReLU(), Adapter(nn.Linear(32, 32)), nn.ReLU(), last)


def frozen_backbone() -> nn.Module:
    backbone = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    return nn.Sequential(backbone.requires_grad_(requires_grad=False), nn.Linear(32, 4))


def zero_head() -> nn.Module:
    model = classifier()
    nn.init.zeros_(model[-1].weight)  # type: ignore[index, arg-type]
    nn.init.zeros_(model[-1].bias)  # type: ignore[index, arg-type]
    return model


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))


def half_precision_data(seed: int) -> tuple[Tensor, Tensor]:
    x, y = blobs(seed)
    return x.bfloat16(), y


def loops() -> dict[str, Setting]:
    """The plain loops by name."""
    mse, huber, entropy = functional.mse_loss, functional.huber_loss, functional.cross_entropy
    binary = functional.binary_cross_entropy_with_logits
    two_heads = [Task(two_targets, functools.partial(TwoHeads, classes_last=last), both_losses, adam(1e-2), log_two)
                 for last in (False, True)]  # fmt: skip
    return {
        "regression, MSE": regression(1.0, mse, 5e-3),
        "regression, MSE, targets of 10": regression(10.0, mse, 2e-2),
        "regression, MSE, targets of 100000": regression(1e5, mse, 2e-2),
        "regression, MSE, four targets of 10": regression(10.0, mse, 2e-2, targets=4),
        "regression, Huber, targets of 10": regression(10.0, huber, 2e-2),
        "regression, L1, targets of 100": regression(100.0, functional.l1_loss, 2e-2),
        "two tasks, regression last": two_heads[0],
        "two tasks, classes last": two_heads[1],
        "many labels": Task(many_labels, functools.partial(regressor, 6), binary, adam(1e-2), log_loss(binary)),
        "language model": Task(tokens, Language, next_token, adam(1e-2), log_loss(next_token)),
        "summed cross-entropy": Task(blobs, classifier, summed_loss, sgd(0.1 / BATCH), log_both),
        "converged, accuracy only": Task(blobs, classifier, entropy, sgd(0.5), log_accuracy, rounds=25),
        "converged, accuracy only, data unknown": Task(
            blobs, classifier, entropy, adam(2e-2), log_accuracy, tells_data=False, rounds=25
        ),
        "converged, nothing logged": Task(blobs, classifier, entropy, adam(2e-2), tells_data=False, rounds=25),
        "adapters and a head": Task(blobs, functools.partial(adapted, head=True), entropy, adam(3e-3), log_both),
        "adapters alone": Task(blobs, functools.partial(adapted, head=False), entropy, adam(3e-3), log_both),
        "adapters alone, slow, nothing logged": Task(
            blobs, functools.partial(adapted, head=False), entropy, adam(1e-4), tells_data=False
        ),
        "adapters alone, one step a round": Task(
            lambda seed: blobs(seed, samples=CLIENTS * BATCH), functools.partial(adapted, head=False), entropy,
            sgd(0.05), log_both,
        ),
        "frozen backbone": Task(blobs, frozen_backbone, entropy, adam(3e-3), log_both),
        "frozen backbone, slow": Task(blobs, frozen_backbone, entropy, adam(1e-4), log_both),
        "head that begins at 0": Task(blobs, zero_head, entropy, sgd(0.1), log_both),
        "bfloat16": Task(
            half_precision_data, lambda: classifier().bfloat16(), entropy, sgd(0.1),
            lambda model, x, y: {"loss": float(functional.cross_entropy(model(x).float(), y))},
        ),
    }  # fmt: skip


# -- Flower -----------------------------------------------------------------------------------------------------------


def mixed_evaluation(monitor: fv.Monitor, seed: int, *, better: str) -> None:
    """Clients evaluate in every round, the server in every third, on data that one of the two knows better."""
    import flower_by_hand as hand
    from flwr.app import Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg

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
    import flower_by_hand as hand
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg

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


def settings() -> dict[str, Setting]:
    """Every setting by name."""
    found: dict[str, Setting] = {}
    for model, (name, compression) in itertools.product(LAB_MODELS, LAB_COMPRESSIONS.items()):
        found[f"lab {model}, {name}"] = functools.partial(
            lab_setting, model=LAB_MODELS[model], compression=compression
        )
    for name, compress in HAND_COMPRESSIONS.items():
        found[f"by hand, {name}"] = functools.partial(compressed_loop, compress=compress)
    for (name, change), privacy in itertools.product(FLOWER_COMPRESSIONS.items(), (2, 3)):
        found[f"Flower, {name}, level {privacy}"] = functools.partial(
            compressed_flower, compress=change, privacy=privacy
        )
    for better in ("server", "clients"):
        found[f"Flower, two evaluations, the {better}' lower".replace("server'", "server's")] = functools.partial(
            mixed_evaluation, better=better
        )
    return found | loops()


def main(seeds: int, wanted: list[str]) -> None:
    """Print one line for each setting, and how many of them were silent."""
    chosen = {name: run for name, run in settings().items() if not wanted or any(word in name for word in wanted)}
    silent = 0
    for name, run in chosen.items():
        found: Counter[str] = Counter()
        notes: set[str] = set()
        for seed in range(seeds):
            told = judged(run, seed)
            found.update(f"{case.severity} {case.issue}" for case in told if is_trouble(case))
            notes |= {case.issue for case in told if not is_trouble(case)}
        silent += not found
        spoken = ", ".join(f"{count} {what}" for what, count in sorted(found.items())) or "none"
        print(f"| {name} | {seeds} | {spoken} | {', '.join(sorted(notes)) or 'none'} |", flush=True)  # noqa: T201
    print(f"{silent} of {len(chosen)} settings without warning or critical, {seeds} seeds each")  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| setting | seeds | warnings and criticals | notes |\n| --- | --- | --- | --- |")  # noqa: T201
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2:])
