# SPDX-License-Identifier: Apache-2.0
"""Tokens that a client's training reads: how many, how long its texts are, what is padding, and how fast it goes.

A hook before the model's forward pass sees the integers [texts, positions] that go in, and the mask beside them. What
is counted stays on its device until the client's scope closes. Only models with an embedding are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedvitals.model_hooks import Hook, can_be_hooked
from fedvitals.probes.view import View

_TOKENS = (torch.int64, torch.int32)

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


class TokenCounts:
    """Counts from its creation until `remove`; `metrics` are then known, in part as tensors on a device."""

    def __init__(self, model: nn.Module, failed: Callable[[Exception], None]) -> None:
        self._model = model
        self._texts = self._positions = self._widest = 0
        self._tokens: int | Tensor = 0
        self._full: dict[int, tuple[int, int | Tensor]] = {}  # by width: texts, and those without padding
        self._masked = False
        self._padding = getattr(getattr(model, "config", None), "pad_token_id", None)
        self._handle: Any = None
        if can_be_hooked(model) and any(isinstance(module, nn.Embedding) for module in model.modules()):
            self._handle = model.register_forward_pre_hook(Hook(self._count, failed), with_kwargs=True)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _count(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        tokens = named.get("input_ids")
        if tokens is None:
            tokens = next((part for part in (*arguments, *named.values()) if _is_tokens(part)), None)
        if tokens is None or not _is_tokens(tokens):
            return
        texts, width = tokens.shape
        mask = named.get("attention_mask")
        if not (isinstance(mask, Tensor) and mask.shape == tokens.shape):
            mask = None if self._padding is None else tokens != self._padding
        self._texts, self._positions = self._texts + texts, self._positions + texts * width
        self._widest = max(self._widest, width)
        known, full = self._full.get(width, (0, 0))
        if mask is None:
            self._tokens += texts * width
            self._full[width] = known + texts, full + texts
            return
        self._masked = True
        lengths = (mask != 0).sum(1)
        self._tokens += lengths.sum()
        self._full[width] = known + texts, full + (lengths == width).sum()

    def metrics(self, seconds: float) -> dict[str, float | Tensor]:
        """Return what was counted, as metrics; `seconds` are those of the training."""
        if not self._texts:
            return {}
        metrics: dict[str, float | Tensor] = {"tokens": self._tokens, "tokens.length": self._tokens / self._texts}
        if self._masked:
            metrics["tokens.padding"] = 1 - self._tokens / self._positions
            metrics["tokens.full"] = self._full[self._widest][1] / self._texts
        if seconds > 0:
            metrics["throughput.tokens"] = self._tokens / seconds
            work = self._flops_per_token() / seconds
            metrics |= {"model.flops_utilisation": self._tokens * work} if work else {}
        return metrics

    def _flops_per_token(self) -> float:
        """Return the share of a device's peak that one token a second takes; 0 where the peak is not known.

        A forward pass takes 2 operations for each weight of a product, a backward pass as many for the inputs, and as
        many again for weights that train. An embedding is looked up, unless the output layer shares it.
        """
        first = next(self._model.parameters(), None)
        peak = peak_flops(torch.cuda.get_device_name(first.device)) if first is not None and first.is_cuda else None
        if peak is None:
            return 0.0
        parameters = [*self._model.parameters()]
        products = {id(m.weight) for m in self._model.modules() if isinstance(m, nn.Linear)}
        tables = {id(m.weight) for m in self._model.modules() if isinstance(m, nn.Embedding)} - products
        used = [p for p in parameters if id(p) not in tables and p.dim() > 1]
        return sum(p.numel() * (6 if p.requires_grad else 4) for p in used) / peak


def peak_flops(name: str) -> float | None:
    """Return the operations a second of a GPU in half precision, by its name; None if it is not known."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def _is_tokens(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() == 2 and part.dtype in _TOKENS


def count_tokens(view: View, report: Callable[[Exception, str], None]) -> TokenCounts | None:
    """Begin to count the tokens that a client's model is given; None for a model that no client has."""
    if view.node is None:
        return None
    return TokenCounts(view.model, lambda error: report(error, "counting tokens"))
