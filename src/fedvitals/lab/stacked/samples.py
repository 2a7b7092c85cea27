# SPDX-License-Identifier: Apache-2.0
"""A stack's samples, where it trains: of its clients in one tensor, and those on which a model is tested.

On a device they are made there, of a data set that stays there (`lab/data/cache.py`), and all clients' are kept: so
another cohort in each round changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedvitals.lab.data.cache import resident
from fedvitals.lab.engines.executor import Examination, examined
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.work import Node
from fedvitals.lab.faults import table as ill


class Samples:
    def __init__(self, site: Site, device: torch.device) -> None:
        self._site, self._device = site, device
        self._kept: tuple[Any, Tensor, Tensor, Tensor] | None = None

    def training(self, nodes: Sequence[Node], number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Clients' samples and labels in one tensor each, where each one's begin, and how many they are.

        Kept for as long as they stay the same.
        """
        e = self._site.experiment
        held = nodes if self._device.type == "cpu" else e.nodes
        ailing = [(fault, n) for fault in e.faults for n in held if ill.any_at("data", (fault,), number, n)]
        key = (tuple(held), tuple(fault for fault, _ in ailing))
        if self._kept is None or self._kept[0] != key:
            parts = self._parts(held, number, {node for _, node in ailing})
            counts = torch.tensor([0, *(len(y) for _, y in parts)]).cumsum(0)
            self._kept = (key, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), counts)
        _, x, y, offsets = self._kept
        firsts, samples = offsets[:-1], offsets.diff()
        if held is not nodes:
            order = {node: place for place, node in enumerate(held)}
            chosen = torch.tensor([order[node] for node in nodes])
            firsts, samples = firsts[chosen], samples[chosen]
        return x, y, firsts, samples

    def _parts(self, nodes: Sequence[Node], number: int, ailing: set[Node]) -> list[tuple[Tensor, Tensor]]:
        if self._device.type == "cpu":
            return [self._site.tensors(node, number) for node in nodes]
        found = []
        for node in nodes:
            if node in ailing or not self._plain(node):
                x, y = self._site.tensors(node, number)
                found.append((x.to(self._device), y.to(self._device)))
            else:
                found.append(self._of(self._site.shards[node].train))
        return found

    def _plain(self, node: Node) -> bool:
        """Whether the client sees the data set's samples as they are."""
        shard = self._site.shards[node]
        return shard.brightness == 1 and not shard.rotation

    def _of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        there = resident(self._site.dataset, self._device)
        rows = rows.to(self._device)
        return self._site.dataset.inputs(there.x.index_select(0, rows)), there.y.index_select(0, rows)

    def examined(self, examination: Examination) -> tuple[Tensor, Tensor]:
        """What a state is tested on."""
        if self._device.type == "cpu":
            return examined(self._site, examination)
        if examination.rows is not None:
            there, chosen = resident(self._site.dataset, self._device), slice(*examination.rows)
            return self._site.dataset.inputs(there.test_x[chosen]), there.test_y[chosen]
        if all(self._plain(node) for node in examination.nodes):
            return self._of(torch.cat([self._site.shards[node].test for node in examination.nodes]))
        x, y = examined(self._site, examination)
        return x.to(self._device), y.to(self._device)
