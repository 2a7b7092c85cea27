# SPDX-License-Identifier: Apache-2.0
"""One federation as a user would write it, with a fault of our own: FedAvg in plain PyTorch, and the README's lines."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fedvitals as fv
from fedvitals.diagnosis.live_detectors import FindingList
from fedvitals_studies.outside.tasks import HALVES, Task

DATA_FAULTS = frozenset(
    {"label_flip", "label_noise", "input_noise", "input_scale", "constant", "missing_classes", "repeated"}
)
STALE_BY = 3  # rounds


@dataclass(frozen=True)
class Setting:
    """A federation and its fault; everything that is drawn from the seed besides."""

    half: str
    task: int
    seed: int
    fault: str | None
    strength: float
    onset: int
    clients: int
    culprits: int
    alpha: float | None  # of Dirichlet; None: IID
    adam: bool
    epochs: int
    given: str  # «data+loss», «data», «nothing»
    form: str  # in which data are given: «tensors», «loader», «dataset»
    passed: bool  # whether updates are passed to `monitor.updates`; faults of updates then come after training
    privacy: int
    rounds: int = 12


class OwnDataset(Dataset[tuple[Tensor, Tensor]]):
    """A data set of the user's own class, read sample by sample."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.rows = [*zip(x, y, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index]


def federate(setting: Setting) -> tuple[FindingList, list[str], float]:
    """Train it, and return the findings, the culprits, and how good the model became (accuracy, or R²)."""
    rng, _ = np.random.default_rng(setting.seed), torch.manual_seed(setting.seed)
    task = HALVES[setting.half][setting.task](rng)
    held = len(task.x) // 5
    shards = _divided(task.y[held:], setting, rng)
    data = {f"c{i}": (task.x[held:][shard], task.y[held:][shard]) for i, shard in enumerate(shards)}
    culprits = _culprits(data, setting, rng)
    loss = functional.cross_entropy if task.classes else functional.mse_loss
    own_data = {name: _in_form(own, setting) for name, own in data.items()}
    model, past = task.model(), []
    with fv.Monitor(None, run="outside", privacy=setting.privacy, machine=False, strict=True) as monitor:
        for round_index in range(setting.rounds):
            begun = setting.fault is not None and round_index >= setting.onset
            if begun and round_index == setting.onset and setting.fault in DATA_FAULTS:
                for name in culprits:
                    data[name] = spoilt(data[name], task, setting, rng)
                    own_data[name] = _in_form(data[name], setting)
            past.append(copy.deepcopy(model.state_dict()))
            states = {}
            with monitor.round(round_index, model):
                for name, (x, y) in data.items():
                    fault = setting.fault if begun and name in culprits else None
                    local = copy.deepcopy(model)
                    with monitor.client(name, local, **_client_arguments(own_data[name], loss, setting)):
                        if fault == "stale" and not setting.passed:
                            local.load_state_dict(past[max(0, round_index - STALE_BY)])
                        _train(local, x, y, loss, task, setting, setting.strength if fault == "rate" else 1.0)
                        if fault and not setting.passed:
                            local.load_state_dict(_sent(fault, local.state_dict(), past[-1], setting, past[-1]))
                    states[name] = local.state_dict()
                    if fault and setting.passed:
                        old = past[max(0, round_index - STALE_BY)]
                        states[name] = _sent(fault, states[name], past[-1], setting, old)
                if setting.passed:
                    names = [name for name, _ in model.named_parameters()]
                    sent = {c: {n: state[n] - past[-1][n] for n in names} for c, state in states.items()}
                    monitor.updates(round_index, sent)
                model.load_state_dict(_average(states, past[-1]))
                monitor.log({"accuracy" if task.classes else "r2": _quality(model, task, held)})
        findings = monitor.findings()
    return findings, culprits, _quality(model, task, held)


def spoilt(own: tuple[Tensor, Tensor], task: Task, setting: Setting, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return a client's data with the fault in them."""
    x, y, strength = own[0].clone(), own[1].clone(), setting.strength
    match setting.fault:
        case "label_flip":
            common = int(torch.bincount(y).argmax())
            y[y == common] = (common + 1) % task.classes
        case "label_noise":
            wrong = torch.as_tensor(rng.random(len(y)) < strength)
            if task.classes:
                y[wrong] = (y[wrong] + torch.as_tensor(rng.integers(1, task.classes, int(wrong.sum())))) % task.classes
            else:
                y[wrong] = y[wrong][torch.as_tensor(rng.permutation(int(wrong.sum())))]
        case "input_noise":
            x += torch.as_tensor(rng.normal(0, strength * float(x.std()), x.shape), dtype=x.dtype)
        case "input_scale":
            x *= strength
        case "constant":
            x.reshape(len(x), -1)[:, : x[0].numel() // 2] = float(x.max())
        case "missing_classes":
            kept = torch.isin(y, torch.bincount(y).argsort(descending=True)[: max(1, task.classes // 2)])
            x, y = x[kept], y[kept]
        case "repeated":
            x, y = torch.cat([x, x]), torch.cat([y, y])
    return x, y


def _sent(
    fault: str, state: dict[str, Tensor], start: dict[str, Tensor], setting: Setting, old: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return what a client sends in place of what it trained."""
    factor = {"zero": 0.0, "sign_flip": -1.0, "scaled": setting.strength}.get(fault)
    if fault == "nan":
        return {name: torch.full_like(v, torch.nan) if v.is_floating_point() else v for name, v in state.items()}
    if fault == "stale":
        return {name: v - start[name] + old[name] for name, v in state.items()}
    return state if factor is None else {n: start[n] + (factor * (v - start[n])).to(v.dtype) for n, v in state.items()}


def _train(model: nn.Module, x: Tensor, y: Tensor, loss: Any, task: Task, setting: Setting, times: float) -> None:
    kind, rate = (torch.optim.Adam, task.adam) if setting.adam else (torch.optim.SGD, task.sgd)
    optimizer = kind(model.parameters(), lr=rate * times)
    model.train()
    for _ in range(min(setting.epochs, 2) if x.dim() == 4 else setting.epochs):
        for batch in torch.randperm(len(x)).split(20):
            if len(batch) > 1:
                optimizer.zero_grad()
                loss(model(x[batch]), y[batch]).backward()
                optimizer.step()


def _average(states: dict[str, dict[str, Tensor]], before: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean of the clients' states; one that is not finite is left out, as many loops do."""
    finite = [s for s in states.values() if all(bool(v.isfinite().all()) for v in s.values() if v.is_floating_point())]
    return {n: torch.stack([s[n].to(v.dtype) for s in finite]).float().mean(0).to(v.dtype) for n, v in before.items()}


def _divided(y: Tensor, setting: Setting, rng: np.random.Generator) -> list[Tensor]:
    if setting.alpha is None or y.is_floating_point():
        return [*torch.as_tensor(rng.permutation(len(y))).tensor_split(setting.clients)]
    shards: list[list[int]] = [[] for _ in range(setting.clients)]
    for label in y.unique().tolist():
        places = rng.permutation(np.flatnonzero(y.numpy() == label))
        cuts = (rng.dirichlet(np.full(setting.clients, setting.alpha)).cumsum()[:-1] * len(places)).astype(int)
        for shard, part in zip(shards, np.split(places, cuts), strict=True):
            shard.extend(part.tolist())
    for shard in shards:  # nobody has next to nothing
        while len(shard) < 12:
            largest = max(shards, key=len)
            shard.append(largest.pop(int(rng.integers(len(largest)))))
    return [torch.as_tensor(shard) for shard in shards]


def _culprits(data: dict[str, tuple[Tensor, Tensor]], setting: Setting, rng: np.random.Generator) -> list[str]:
    """Return who is faulty: for a flipped class, of those with 15 % of one; never one of the smallest third."""
    large = sorted(data, key=lambda name: -len(data[name][1]))[: max(2, 2 * len(data) // 3)]
    if setting.fault == "label_flip":
        large = [n for n in large if int(torch.bincount(data[n][1]).max()) >= 0.15 * len(data[n][1])]
    count = min(setting.culprits, len(large)) if setting.fault else 0
    return [large[i] for i in rng.choice(len(large), count, replace=False)] if count else []


def _in_form(own: tuple[Tensor, Tensor], setting: Setting) -> Any:
    match setting.form:
        case "tensors":
            return own
        case "loader":
            return DataLoader(TensorDataset(*own), batch_size=20, shuffle=True)
    return DataLoader(OwnDataset(*own), batch_size=20, shuffle=True)


def _client_arguments(data: Any, loss: Any, setting: Setting) -> dict[str, Any]:
    return {"data": {"data": data}, "data+loss": {"data": data, "loss": loss}, "nothing": {}}[setting.given]


def _quality(model: nn.Module, task: Task, held: int) -> float:
    with contextlib.suppress(RuntimeError), torch.no_grad():
        output, y = model.eval()(task.x[:held]), task.y[:held]
        model.train()
        return float((output.argmax(1) == y).float().mean()) if task.classes else 1 - float(((output - y) ** 2).mean())
    return float("nan")


def drawn(half: str, fault: str | None, strengths: Sequence[float], number: int, seed: int) -> Setting:
    """Draw one federation: the number chooses task and strength, the seed the rest."""
    rng = np.random.default_rng(seed)
    task = number % len(HALVES[half])
    clients = int(rng.choice([6, 8, 12, 20, 30], p=[0.25, 0.25, 0.25, 0.15, 0.1]))
    return Setting(
        half, task, seed, fault, strengths[number % len(strengths)], int(rng.choice([0, 4, 6, 6])), clients,
        2 if clients >= 20 and rng.random() < 0.5 else 1,
        [None, 1.0, 0.3][rng.integers(3)], bool(rng.random() < 0.4), int(rng.choice([1, 2, 4])),
        str(rng.choice(["data+loss", "data+loss", "data+loss", "data", "nothing"])),
        str(rng.choice(["tensors", "loader", "dataset"])), bool(rng.random() < 0.5), int(rng.choice([3, 3, 2])),
        16 if fault is None else 12,
    )  # fmt: skip
