# SPDX-License-Identifier: Apache-2.0
"""How much of a training's memory is accounted for: our count against every storage that torch creates and frees.

The reference follows each tensor that any operation returns, from creation to deletion (a dispatch mode, which misses
nothing that the profiler sees), and knows nothing of graphs, hooks or optimisers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedvitals.resources.tensors import StepWatch, shares
from fedvitals_studies.bench.workloads import WORKLOADS, Workload

Row = dict[str, Any]


class LiveStorages(TorchDispatchMode):
    """Every storage created inside the block, or named before it; freed ones are dropped."""

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.peak = 0
        for tensor in there:
            self._meet(tensor)

    def bytes(self) -> int:
        """Return the bytes of all live storages."""
        self._alive = {key: entry for key, entry in self._alive.items() if entry[0]() is not None}
        return sum(size for _, size in self._alive.values())

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = (weakref.ref(storage), storage.nbytes())  # noqa: SLF001 - its identity

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._meet(leaf)
        self.peak = max(self.peak, self.bytes())
        return result


def memory_seen(*, quick: bool = False, tell: Callable[[str], None] = lambda _text: None) -> list[Row]:
    """Return rows of bytes counted and bytes known for a CNN, a ResNet, and two transformers (ours, torch's)."""
    rows = []
    for workload in WORKLOADS[1:2] if quick else WORKLOADS[1:]:
        tell(f"memory of {workload.name}")
        torch.manual_seed(0)
        x, y = workload.data(workload.batch)
        model = workload.model()
        rows.append({"workload": workload.name, **seen_and_known(model, workload.optimizer(model), x, y)})
    if not quick:
        tell("memory of torch's transformer")
        model = torch_transformer()
        x, y = Workload("transformer", torch_transformer, (64,), 10, 16, block=1).data(16)
        optimizer = torch.optim.Adam(model.parameters())
        rows.append({"workload": "nn.TransformerEncoder", **seen_and_known(model, optimizer, x, y)})
    return rows


def torch_transformer() -> nn.Module:
    """Return a typical model: embedding, three layers with dropout, a dense head."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.Sequential(nn.Embedding(1000, 64), nn.TransformerEncoder(layer, 3), nn.Flatten(), nn.Linear(64 * 64, 10))


def seen_and_known(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Row:
    """Run two steps: the first creates the optimiser's state, the second is measured, before its backward pass and
    after.

    Known: what is alive when the backward pass begins, and the gradients that it adds. Seen: the same by our count.
    `peak_bytes`: the peak. Gradients appear as activations disappear, and an optimiser has temporary copies.
    """
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    watch = StepWatch({}, model, 0)
    with LiveStorages([*model.parameters(), *model.buffers(), *state, x, y]) as live:
        output = model(x)
        loss = F.cross_entropy(output, y)
        before = live.bytes()
        loss.backward()
        gradients = sum(p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None)
        optimizer.step()
    watch.remove()
    seen = {**shares(model, [optimizer]), "activations": watch.bytes or 0}
    known = before + gradients
    total = sum(seen.values())
    told = {"seen_bytes": total, "known_bytes": known, "seen_percent": 100 * total / known, "peak_bytes": live.peak}
    return {**seen, **told}
