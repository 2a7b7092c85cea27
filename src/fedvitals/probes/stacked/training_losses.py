# SPDX-License-Identifier: Apache-2.0
"""Training losses by class of stacked clients: the same numbers as `training_losses`, from logits kept by the host.

The host knows the labels, so no gradient is needed. Everything is computed on the device, and copied to the host once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedvitals.kernels.cuda.sums import upload
from fedvitals.probes.class_losses import (
    ClassSums,
    ClassTotals,
    Places,
    judge_labels,
    last_quota,
    pass_masks,
    text_rows,
)
from fedvitals.probes.token_counts import is_vocabulary

TOGETHER = 1 << 22  # logits evaluated at a time
_NO_PASS = 1 << 62  # assumed samples in a pass of unknown length

Outputs = Mapping[int, tuple[Tensor, Tensor]]


def stacked_losses(
    module: nn.Module, outputs: Outputs, steps: Sequence[int], samples: Sequence[int] | None
) -> ClassSums | None:
    """Return the sums of all clients, which train models like this one; None if nothing was kept.

    outputs: logits [clients, n, ..., classes] and labels [clients, n, ...] by step. steps: of each client. samples: in
    a pass of each client; None: unknown.
    """
    if not outputs:
        return None
    logits, labels = next(iter(outputs.values()))
    clients, batch, classes = logits.shape[0], logits.shape[1], logits.shape[-1]
    language = labels.dim() > 2 and is_vocabulary(module, classes)
    totals = ClassTotals(classes, logits.device, clients, language=language)
    own = [_NO_PASS] * clients if samples is None else [max(1, count) for count in samples]
    length = np.array(own)[:, None]
    quota = np.array([0 if count == _NO_PASS else last_quota(count) for count in own])[:, None]
    end = np.array(steps)[:, None] * batch
    for places, chosen in _portions(outputs, batch):
        first, last = pass_masks(places, length, quota, end)
        _add(totals, chosen, torch.from_numpy(first), torch.from_numpy(last))
    return ClassSums(totals, totals.numbers.cpu().double().numpy())


def _portions(outputs: Outputs, batch: int) -> Iterator[tuple[Places, tuple[Tensor, Tensor]]]:
    """Yield steps that are evaluated together: the numbers of their samples, [1, n], and logits and labels."""
    steps = sorted(outputs)
    together = max(1, TOGETHER // max(1, outputs[steps[0]][0].numel()))
    for begin in range(0, len(steps), together):
        chosen = steps[begin : begin + together]
        places = np.concatenate([step * batch + np.arange(batch) for step in chosen])[None]
        yield places, tuple(torch.cat([outputs[step][part] for step in chosen], 1) for part in (0, 1))  # type: ignore[misc]


@torch.no_grad()
def _add(totals: ClassTotals, outputs: tuple[Tensor, Tensor], first: Tensor, last: Tensor) -> None:
    """Add the samples in the masks, [clients, n], to the totals."""
    logits, labels = outputs
    rows = labels[0, 0].numel()  # per sample: several for sequences
    texts = text_rows(labels >= 0) if totals.language else None
    judged = judge_labels(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), texts)
    client = torch.arange(totals.clients).repeat_interleave(first.shape[1] * rows)
    masks = torch.stack([first, last]).flatten(1).repeat_interleave(rows, 1)
    client, masks = upload(client, logits.device), upload(masks, logits.device)
    totals.add_first(judged, masks[0], client)
    totals.add_last(judged, masks[1], client)
