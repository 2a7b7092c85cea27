# SPDX-License-Identifier: Apache-2.0
"""Healthy plain loops on which detectors were once wrong: compressed by hand, regression, several tasks, adapters."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedvitals as fv

Setting = Callable[[fv.Monitor, int], None]
CLIENTS, ROUNDS, BATCH = 10, 14, 16


# -- compression by hand, in a loop that hands its updates over --------------------------------------------------------


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


def summed_l1(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.l1_loss(outputs, targets, reduction="sum")


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
        "regression, summed L1": Task(functools.partial(numbers, scale=10.0), regressor, summed_l1, sgd(2**-10)),
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
