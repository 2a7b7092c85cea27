# SPDX-License-Identifier: Apache-2.0
"""Tokens that a client's training reads: how many, how long its texts are, what is padding, and how fast it goes.

A hook after the model's forward pass sees the integers [texts, positions] that went in, the mask beside them, over how
many classes the outputs are, and the loss of a model that returns one. What is counted stays on its device until the
client's scope closes. Only models with an embedding are looked at.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedvitals.model_hooks import Hook, can_be_hooked, trained_part, walked
from fedvitals.probes.differentiate import logits_of
from fedvitals.probes.view import View
from fedvitals.stats import Array

_LOG = logging.getLogger("fedvitals")
IGNORED = -100  # the target of what is not learnt
END_SHARE, MOST_PASSES = 8, 8  # perplexities are of the first and the last eighth of the passes, and of no more of them
_TOKENS = (torch.int64, torch.int32)
PENALISED = "ADALORA"  # of peft: the loss that it returns holds a penalty on A and B
# Settings of models of which a token does not pass through all weights: decoders read other tokens, experts a part.
UNEVEN = ("is_encoder_decoder", "num_local_experts", "num_experts", "n_routed_experts")

PEAK = "FEDVITALS_PEAK_FLOPS"  # of the environment: operations a second of the device that a process trains on
# Dense operations a second in half precision, by what the name of a GPU holds; the first that fits.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
    "L4": 1.21e14,
    "V100": 1.25e14,
    "T4": 6.5e13,
    "RTX 4090": 1.65e14,
}


@dataclass(frozen=True, slots=True)
class CountedTokens:
    """A training's tokens, on their way to the host. Those of several processes add up.

    `numbers`: texts, positions, tokens, texts without padding of the widest batch, processes; and of a model that
    returns its loss, the sums of losses and targets in the first passes, and in the last. `seconds`: of the training.
    `token_cost`: the share of a device's peak that one token a second takes; 0 where the peak is not known.
    """

    numbers: Tensor | Array
    seconds: float
    masked: bool
    predicted: bool  # whether the model's outputs are over the tokens of its own vocabulary
    token_cost: float

    def metrics(self, numbers: Array) -> dict[str, float]:
        """Return the metrics, from the `numbers` on the host."""
        texts, positions, tokens, full, processes = (float(number) for number in numbers[:5])
        metrics = {"tokens": tokens, "tokens.length": tokens / texts}
        if self.masked:
            metrics |= {"tokens.padding": 1 - tokens / positions, "tokens.full": full / texts}
        if self.seconds > 0:
            speed = metrics["throughput.tokens"] = tokens / self.seconds
            metrics |= {"model.flops_utilisation": speed * self.token_cost / processes} if self.token_cost else {}
        return metrics

    def losses(self, numbers: Array) -> dict[str, float]:
        """Return the mean losses «before» and «after» the training, for a model that returns them."""
        first, last = numbers[5:].reshape(2, 2).tolist()
        return {when: loss / targets for when, (loss, targets) in (("before", first), ("after", last)) if targets}


class TokenCounts:
    """Counts from its creation until `remove`; `counted` is then known, in part as tensors on a device."""

    def __init__(self, model: nn.Module, failed: Callable[[Exception], None]) -> None:
        self._model = trained_part(model)  # of a trainer's module, the language model in it
        self._texts = self._positions = self._widest = self._classes = 0
        self._tokens: int | Tensor = 0
        self._passes = 0  # that returned a loss
        self._first: list[tuple[Tensor, Tensor]] = []  # of these: sums of losses, and targets
        self._last: deque[tuple[Tensor, Tensor]] = deque(maxlen=MOST_PASSES)
        self._full: dict[int, int | Tensor] = {}  # by width: texts without padding
        self._masked = False
        self._padding = self._setting("pad_token_id")
        self._handle: Any = None
        if can_be_hooked(model) and any(isinstance(module, nn.Embedding) for module in self._model.modules()):
            self._handle = self._model.register_forward_hook(Hook(self._count, failed), with_kwargs=True)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _count(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        tokens = tokens_among(arguments, named)
        if tokens is None:
            return
        logits = logits_of(output)
        if isinstance(logits, Tensor) and logits.dim() > 1:
            self._classes = logits.shape[-1]
        self._add_loss(named, output)
        texts, width = tokens.shape
        mask = named.get("attention_mask")
        if not (isinstance(mask, Tensor) and mask.shape == tokens.shape):
            mask = None if self._padding is None else tokens != self._padding
        self._texts, self._positions = self._texts + texts, self._positions + texts * width
        self._widest = max(self._widest, width)
        full = self._full.get(width, 0)
        if mask is None:
            self._tokens += texts * width
            self._full[width] = full + texts
            return
        self._masked = True
        lengths = (mask != 0).sum(1)
        self._tokens += lengths.sum()
        self._full[width] = full + (lengths == width).sum()

    def _add_loss(self, named: Mapping[str, Any], output: Any) -> None:
        """Add the loss that a model returns: a mean over the targets, or their sum over `num_items_in_batch`."""
        loss, labels = getattr(output, "loss", None), named.get("labels")
        if not (isinstance(loss, Tensor) and loss.dim() == 0 and isinstance(labels, Tensor) and labels.dim() == 2):
            return
        if getattr(self._model, "peft_type", None) == PENALISED:
            return
        aside, weight = getattr(output, "aux_loss", None), getattr(self._model, "router_aux_loss_coef", None)
        if isinstance(aside, Tensor) and isinstance(weight, float):  # of a mixture of experts, how they are used
            loss = loss.detach() - weight * aside.detach().to(loss.device)
        # Whether the next token is the target; a decoder beside an encoder gets its labels moved.
        moved = not (getattr(self._model, "loss_type", None) == "ForMaskedLM" or self._setting("is_encoder_decoder"))
        moved &= not _follows_a_prompt(output, labels)
        targets = (labels[:, int(moved) :] != IGNORED).sum()
        items = named.get("num_items_in_batch") if _sums_over_items(self._model) else None
        own = loss.detach().float() * (targets if items is None else items), targets
        self._passes += 1
        self._last.append(own)
        if len(self._first) < MOST_PASSES:
            self._first.append(own)

    def counted(self, seconds: float) -> CountedTokens | None:
        """Return what was counted in a training of so many seconds; None of a model that read no tokens."""
        if not self._texts:
            return None
        full = self._full[self._widest]
        end = min(MOST_PASSES, -(-self._passes // END_SHARE))
        parts = (self._first[:end], [*self._last][len(self._last) - end :])
        losses = [sum(own[place] for own in part) for part in parts for place in (0, 1)]
        counts = [self._texts, self._positions, self._tokens, full, 1, *losses]
        device = next((count.device for count in counts if isinstance(count, Tensor)), None)
        numbers: Tensor | Array = np.array(counts, np.float64) if device is None else _stacked(counts, device)
        predicted = is_vocabulary(self._model, self._classes) if self._classes else bool(self._passes)
        return CountedTokens(numbers, seconds, self._masked, predicted, self._token_cost())

    def _setting(self, name: str) -> Any:
        return _setting(self._model, name)

    def _token_cost(self) -> float:
        """Return the share of a device's peak that one token a second takes; 0 where the peak is not known, or not all
        tokens pass through all weights.

        A forward pass takes 2 operations for each weight of a product, a backward pass as many for the inputs, and as
        many again for weights that train. An embedding is looked up, unless the output layer shares it.
        """
        first = next(self._model.parameters(), None)
        peak = None if first is None else device_peak(first.device)
        if peak is None or any(self._setting(name) for name in UNEVEN):
            return 0.0
        products, tables, parameters = set[int](), set[int](), list[Tensor]()
        for module in walked(self._model):
            own = module._parameters  # noqa: SLF001 - faster than `parameters`
            parameters += [p for p in own.values() if p is not None and p.dim() > 1]
            if isinstance(module, nn.Linear | nn.Embedding):
                (tables if isinstance(module, nn.Embedding) else products).add(id(module.weight))
        used = {id(p): p for p in parameters if id(p) in products or id(p) not in tables}.values()
        return sum(p.numel() * (6 if p.requires_grad else 4) for p in used) / peak


def _stacked(counts: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Return numbers on a device. Those of the host are filled in there: an upload would wait for the device."""
    own = (count if isinstance(count, Tensor) else torch.full((), count, device=device) for count in counts)
    return torch.stack([count.double() for count in own])


def device_peak(device: torch.device) -> float | None:
    """Return the operations a second of a device: as the environment says, else in half precision by a GPU's name."""
    declared = os.environ.get(PEAK, "")
    try:
        if declared and float(declared) > 0:
            return float(declared)
    except ValueError:
        pass
    if declared:
        _LOG.warning("%s='%s' is ignored: it is a number above 0, such as 9.9e14.", PEAK, declared)
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_flops(name: str) -> float | None:
    """Return the operations a second of a GPU in half precision, by its name; None if it is not known."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


@functools.cache
def _sums_over(forward: Callable[..., Any]) -> bool:
    code: Any = getattr(inspect.unwrap(forward), "__code__", None)
    words = () if code is None else (*code.co_names, *code.co_varnames, *code.co_consts)
    return not words or not {"loss_function", "num_items_in_batch"}.isdisjoint(words)


def _sums_over_items(model: Any) -> bool:
    """Return whether a model heeds `num_items_in_batch`: some take it, and return a mean all the same."""
    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    return not hasattr(own, "loss_function") or _sums_over(type(own).forward)


def _follows_a_prompt(output: Any, labels: Tensor) -> bool:
    """Return whether there are outputs before the first token, as of a prompt that trains: it is a target as well."""
    logits = logits_of(output)
    return isinstance(logits, Tensor) and logits.dim() == 3 and logits.shape[1] > labels.shape[1]


def is_vocabulary(model: nn.Module, classes: int) -> bool:
    """Return whether a model knows so many tokens: as its configuration says, else an embedding's rows."""
    size = _setting(model, "vocab_size")
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return size == classes if isinstance(size, int) else any(t.num_embeddings == classes for t in tables)


def tokens_among(arguments: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
    """Return the tokens, [texts, positions], among what a model was given; None if there are none."""
    tokens = named.get("input_ids")
    if tokens is None:
        tokens = next((part for part in (*arguments, *named.values()) if _is_tokens(part)), None)
    return tokens if _is_tokens(tokens) else None


def _setting(model: nn.Module, name: str) -> Any:
    """Return what a model's configuration says; None where it does not."""
    return getattr(getattr(model, "config", None), name, None)


def _is_tokens(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() == 2 and part.dtype in _TOKENS


def count_tokens(view: View, report: Callable[[Exception, str], None]) -> TokenCounts | None:
    """Begin to count the tokens that a client's model is given; None for a model that no client has."""
    if view.node is None:
        return None
    return TokenCounts(view.model, lambda error: report(error, "counting tokens"))
