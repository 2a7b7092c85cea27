# SPDX-License-Identifier: Apache-2.0
"""One federation that tunes a small language model by low-rank adapters, in a plain loop, with or without a fault.

| fault | what happens from its onset on |
| --- | --- |
| rank_collapse | clients of different ranks are padded with zeros and averaged over all |
| aggregation_bias | clients send other factors of the same product: turned, or with a new A |
| scale_mismatch | some clients train and send with another α/r |
| forgetting | the clients' steps are far too large |
| length_imbalance | texts of some clients shrink to a few bytes and padding; or all are short, and some are cut off |
| loss_spike | in one round, all steps are far too large, or the server enlarges what it has averaged |
| dead_adapter | an adapter is left out of the optimisers, is frozen, or its gradient is lost |

Without a fault, adapters are averaged: with one rank as they are, with several each direction over those who have it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedvitals.lab.adapters import LoraLinear
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Finding
from fedvitals.store.in_memory import MemoryStore
from fedvitals_studies.adapters.texts import (
    HELD_BACK_BYTES,
    IGNORED,
    LANGUAGES,
    MANUAL,
    MANUAL_BYTES,
    OTHER_CODE,
    PACKAGES,
    PADDING,
    WINDOW,
    manual_pages,
    shortened,
    text_of,
    windows,
)
from fedvitals_studies.bench.gpt import GPT, Block

WIDTH, LAYERS, HEADS, VOCABULARY = 48, 2, 4, 256
BATCH, TEST_WINDOWS, PRETRAINING = 8, 64, 400
PIECE = 500  # bytes of a text that are kept together when texts are mixed
ISSUES = {
    "rank_collapse": "RANK_COLLAPSE",
    "aggregation_bias": "ADAPTER_AGGREGATION_BIAS",
    "scale_mismatch": "ADAPTER_SCALE_MISMATCH",
    "forgetting": "FORGETTING",
    "length_imbalance": "LENGTH_IMBALANCE",
    "loss_spike": "LOSS_SPIKE",
    "dead_adapter": "DEAD_ADAPTER",
}
FORGETFUL_RATE = 0.08  # up to twice that, over √(α/r): forty times the largest usual one
SPIKE_ONSET = 6  # a loss has to be steady for a while before it can jump
ENLARGED = 30.0  # times, in one round
PADDED_LENGTH, SHORT_LENGTH, CUT_LENGTH = 14.0, 2.5, 1.25 * WINDOW  # bytes, on average
State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """A federation, drawn from its seed."""

    seed: int
    fault: str | None
    rounds: int
    onset: int
    ranks: tuple[int, ...]  # of the clients
    scale: float  # α/r
    rate: float
    steps: int
    own_texts: bool  # one package each, else a mixture of all
    weighted: bool  # by the length of the texts
    variant: float  # of the fault, from 0 to 1
    padded: bool = False  # texts end early, and are padded to the window
    foreign: str | None = None  # the language of one client's manual pages


def drawn_setting(seed: int, fault: str | None, rounds: int, *, other_texts: bool = False) -> Setting:
    """Return the federation of a seed. `other_texts`: in two of three, texts are padded, or a client's are foreign."""
    generator = np.random.default_rng((seed, 27))
    clients = int(generator.integers(5, 11))
    largest = int(generator.choice([8, 16]))
    mixed = fault == "rank_collapse" or (fault != "aggregation_bias" and generator.random() < 0.5)
    few = [largest // 4, largest // 2]
    ranks = [int(generator.choice(few)) for _ in range(clients - 1)] if mixed else [largest] * (clients - 1)
    onset = int(generator.integers(2, 5)) + (SPIKE_ONSET - 2 if fault == "loss_spike" else 0)
    setting = Setting(
        seed,
        fault,
        rounds,
        onset,
        (*ranks, largest),
        float(generator.choice([1.0, 2.0])),
        float(generator.choice([5e-4, 1e-3, 2e-3])),
        int(generator.integers(3, 9)),
        bool(generator.random() < 0.6),
        bool(generator.random() < 0.5),
        float(generator.random()),
    )
    kind, language = int(generator.integers(3)), str(generator.choice(LANGUAGES))
    padded = fault == "length_imbalance" or (other_texts and kind == 1)
    return replace(setting, padded=padded, foreign=language if other_texts and kind == 2 else None)


@functools.cache
def pretrained() -> GPT:
    """Return the model pretrained on the manual, frozen; the same for all federations."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(WIDTH, LAYERS, HEADS, VOCABULARY)
        optimizer, generator = torch.optim.AdamW(model.parameters(), 3e-3), torch.Generator().manual_seed(0)
        texts = [text_of(MANUAL, MANUAL_BYTES)[:-HELD_BACK_BYTES], *map(text_of, OTHER_CODE)]
        for _ in range(PRETRAINING):
            optimizer.zero_grad()
            parts = [windows(text, 4, generator) for text in texts]
            token_loss(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
            optimizer.step()
    return model.requires_grad_(False)


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).reshape(-1, VOCABULARY), y.reshape(-1), ignore_index=IGNORED)


def output_loss(output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Return the loss of each text or of all, from the model's output, as `monitor.client` takes it."""
    losses = functional.cross_entropy(output.transpose(1, 2), y, reduction="none", ignore_index=IGNORED)
    losses = losses.sum(1) / (y != IGNORED).sum(1)
    return losses if reduction == "none" else losses.mean()


def adapted(rank: int, scale: float) -> GPT:
    """Return the pretrained model with adapters of a rank; the same A for the same rank and more."""
    model = copy.deepcopy(pretrained())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for block in model.blocks:
            assert isinstance(block, Block)  # noqa: S101 - for the type checker
            block.qkv = LoraLinear(block.qkv, rank, scale)  # type: ignore[assignment]
            block.down = LoraLinear(block.down, rank, scale)  # type: ignore[assignment]
    return model


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


class AdapterFederation:
    """The federation of a setting; `run` trains it and returns the detectors' findings."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._generator = torch.Generator().manual_seed(setting.seed)
        self._numbers = np.random.default_rng((setting.seed, 28))
        self._model = adapted(max(setting.ranks), setting.scale)
        names = [*self._numbers.permutation(PACKAGES)[: len(setting.ranks)]]
        texts = [text_of(str(name)) for name in names]
        if setting.foreign is not None:
            texts[0] = manual_pages(setting.foreign)
        if not setting.own_texts and setting.foreign is None:
            pieces = [piece for text in texts for piece in text.split(PIECE)[:-1]]
            order = torch.randperm(len(pieces), generator=self._generator).tolist()
            texts = [torch.cat([pieces[i] for i in order[place :: len(texts)]]) for place in range(len(texts))]
        test = len(texts[0]) // 10
        self._train = [text[:-test] for text in texts]
        self._tests = [windows(text[-test:], 8, self._generator) for text in texts]
        manual = text_of(MANUAL, MANUAL_BYTES)[-HELD_BACK_BYTES:]
        self._held_back = windows(manual, TEST_WINDOWS, torch.Generator().manual_seed(5))
        sizes = self._numbers.integers(1, 4, len(texts)).astype(float)
        self._sizes = sizes if setting.weighted else np.ones(len(texts))
        self._odd = {int(i) for i in self._numbers.permutation(len(texts))[: max(1, len(texts) // 3)]}
        self._lengths = PADDED_LENGTH * self._numbers.uniform(0.6, 1.6, len(texts))

    def run(self, monitor: Monitor) -> None:
        """Train all rounds, monitored."""
        for number in range(self.setting.rounds):
            ill = self.setting.fault is not None and number >= self.setting.onset
            ill = ill and (self.setting.fault != "loss_spike" or number == self.setting.onset)
            with monitor.round(number, self._model):
                states = [self._client(monitor, place, ill=ill) for place in range(len(self.setting.ranks))]
                self._aggregate(states, padded=ill and self.setting.fault == "rank_collapse")
                if number == self.setting.onset and self.setting.fault == "loss_spike" and self.setting.variant < 0.5:
                    self._enlarge()
                with torch.no_grad():
                    loss = torch.stack([token_loss(self._model, *test) for test in self._tests]).mean()
                    forgotten = token_loss(self._model, *self._held_back)
                monitor.log(loss=float(loss), **{"held_back.loss": float(forgotten)})

    def _client(self, monitor: Monitor, place: int, *, ill: bool) -> State:
        setting = self.setting
        rank, fault = setting.ranks[place], setting.fault if ill else None
        scale, rate = setting.scale, setting.rate
        if fault == "scale_mismatch" and place in self._odd:
            scale *= (0.25, 0.5, 4.0, 8.0)[int(setting.variant * 4)]
        if fault == "forgetting" or (fault == "loss_spike" and setting.variant >= 0.5):
            rate = FORGETFUL_RATE * (1 + setting.variant) / scale**0.5
        model = adapted(rank, scale)
        global_state = trained_state(self._model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    whole = global_state[name]
                    parameter.copy_(whole[:rank] if "lora_A" in name else whole[:, :rank])
        x, y = windows(self._train[place], BATCH * setting.steps, self._generator)
        if setting.padded:
            x, y = shortened(x, y, self._length(place, fault), self._generator)
            model.config = SimpleNamespace(pad_token_id=PADDING)  # type: ignore[assignment]
        dead = [p for name, p in model.named_parameters() if fault == "dead_adapter" and self._is_dead(name)]
        optimizer = torch.optim.AdamW(self._trained(model, dead), rate)
        with monitor.client(f"c{place}", model, data=TensorDataset(x, y), loss=output_loss):
            if fault == "aggregation_bias" and setting.variant < 0.5:
                self._new_directions(model)
            for own_x, own_y in zip(x.split(BATCH), y.split(BATCH), strict=True):
                optimizer.zero_grad()
                token_loss(model, own_x, own_y).backward()
                for parameter in dead:
                    parameter.grad = None
                optimizer.step()
            if fault == "aggregation_bias" and setting.variant >= 0.5:
                self._turn(model)
        return {name: p.detach().clone() for name, p in model.named_parameters() if name in global_state}

    def _trained(self, model: nn.Module, dead: Sequence[Tensor]) -> list[Tensor]:
        """Return an optimiser's parameters: a dead adapter is left out, frozen, or only has no gradients."""
        if 1 / 3 <= self.setting.variant < 2 / 3:
            for parameter in dead:
                parameter.requires_grad_(False)
        left_out = {*map(id, dead)} if self.setting.variant < 1 / 3 else set()
        return [p for p in model.parameters() if p.requires_grad and id(p) not in left_out]

    def _length(self, place: int, fault: str | None) -> float:
        """Return the mean length of a client's texts: where some are cut off, those of the others are short."""
        cut = self.setting.fault == "length_imbalance" and self.setting.variant >= 0.5
        usual = float(self._lengths[place]) * (0.35 if cut else 1.0)
        return usual if fault is None or place not in self._odd else CUT_LENGTH if cut else SHORT_LENGTH

    def _is_dead(self, name: str) -> bool:
        """Return whether a parameter belongs to the adapter that does not train: one layer, the same on all clients."""
        layer = ("blocks.0.qkv.", "blocks.0.down.", "blocks.1.qkv.", "blocks.1.down.")[self.setting.seed % 4]
        return name.startswith(layer) and "lora_" in name

    @torch.no_grad()
    def _enlarge(self) -> None:
        """Multiply B of the averaged adapters, as a wrong server learning rate does."""
        for layer in _adapters(self._model):
            layer.lora_B.weight.mul_(ENLARGED)

    @torch.no_grad()
    def _new_directions(self, model: nn.Module) -> None:
        """Let the client begin with its own random A, and B at zero."""
        for layer in _adapters(model):
            drawn = torch.randn(layer.lora_A.weight.shape, generator=self._generator)
            layer.lora_A.weight.copy_(drawn / layer.lora_A.in_features**0.5)
            layer.lora_B.weight.zero_()

    @torch.no_grad()
    def _turn(self, model: nn.Module) -> None:
        """Let the client send another factorisation of its product: B Q and Qᵀ A."""
        for layer in _adapters(model):
            rank = len(layer.lora_A.weight)
            turn = torch.linalg.qr(torch.randn(rank, rank, generator=self._generator))[0]
            layer.lora_A.weight.copy_(turn.T @ layer.lora_A.weight)
            layer.lora_B.weight.copy_(layer.lora_B.weight @ turn)

    @torch.no_grad()
    def _aggregate(self, states: Sequence[State], *, padded: bool) -> None:
        """Average A and B: each direction over the clients that have it, or, `padded` with zeros, over all."""
        weights = torch.tensor(self._sizes / self._sizes.sum(), dtype=torch.float32)
        full = max(self.setting.ranks)
        held = torch.tensor([[float(k < rank) for k in range(full)] for rank in self.setting.ranks])
        shares = held * weights[:, None]
        shares = shares if padded else shares / shares.sum(0)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                of_a = "lora_A" in name
                parts = torch.zeros(len(states), *parameter.shape)
                for place, state in enumerate(states):
                    rank = self.setting.ranks[place]
                    (parts[place, :rank] if of_a else parts[place, :, :rank]).copy_(state[name])
                parameter.copy_((parts * (shares[:, :, None] if of_a else shares[:, None])).sum(0))


def _adapters(model: nn.Module) -> list[LoraLinear]:
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


def watched_run(setting: Setting) -> tuple[list[Finding], MemoryStore, str]:
    """Run a federation with the detectors of «standard»; returns their findings, the records and the run's name."""
    store = MemoryStore()
    with Monitor(None, sinks=[store], seed=setting.seed) as monitor:
        AdapterFederation(setting).run(monitor)
        monitor.flush()
        findings = [*monitor.findings()]
    return findings, store, monitor.run.id
