# SPDX-License-Identifier: Apache-2.0
"""What the lab and its peers train in `fedvitals bench lab`: two federations, and the same as files for the peers.

| name | model | local training | data of a client |
| --- | --- | --- | --- |
| cnn | the paper's, 118,507 weights | 20 mini-batches of 16, Adam 1e-3, ε 1e-7 | 313 images of GTSRB, or made up |
| mlp | 32-64-10, 2,762 weights | 20 mini-batches of 32, SGD 0.05 | 128 vectors of 32 numbers |
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.data.gtsrb import GTSRB
from fedvitals.lab.data.sources import search_folders
from fedvitals.lab.streams import stream

PAPER_CLIENTS = 100
IMAGES, VECTORS = 392, 160  # per client; a fifth of them is its local test
CLASSES = 43
FOREVER = 1_000_000  # rounds: the benchmark stops when it has seen enough

Data = str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class Subject:
    """A federation, as described to both sides."""

    model: str  # cnn or mlp
    clients: int
    iterations: int = 20
    rounds: int = FOREVER
    evaluated: bool = False  # in every round

    @property
    def steps(self) -> int:
        """Mini-batches in a round."""
        return self.clients * self.iterations

    def experiment(self, data: Data = None) -> lab.Experiment:
        evaluation = lab.Evaluation(every=1 if self.evaluated else FOREVER + 1)
        if self.model == "mlp":
            dataset: Any = lab.synthetic(samples=max(1000, self.clients * VECTORS * 5 // 4))
            local = lab.Local(iterations=self.iterations, batch=32, optimizer=lab.sgd(learning_rate=0.05))
            model: Any = lab.mlp(hidden=(64,))
        else:
            # With more clients than in the paper there is less data for each: the total stays the same.
            dataset = images(min(self.clients, PAPER_CLIENTS), data)
            local = lab.Local(iterations=self.iterations, batch=16, optimizer=lab.adam())
            model = lab.paper_cnn()
        return lab.Experiment(
            name=f"bench {self.model}",
            dataset=dataset,
            model=model,
            local=local,
            clients=self.clients,
            rounds=self.rounds,
            evaluation=evaluation,
            seed=2024,
        )


def has_gtsrb(data: Data = None) -> bool:
    """Whether GTSRB is where the lab looks for it."""
    try:
        GTSRB().find(search_folders(data))
    except ConfigError:
        return False
    return True


def images(clients: int, data: Data = None) -> Any:
    """Return traffic signs for `clients` clients; without GTSRB, noisy patterns of the same shape."""
    if has_gtsrb(data):
        return lab.gtsrb() if clients >= PAPER_CLIENTS else lab.gtsrb(samples=clients * IMAGES, test_samples=2000)
    generator = stream(0, "bench images")
    patterns = torch.randint(0, 256, (CLASSES, 3, 8, 8), generator=generator).float()
    count = clients * IMAGES
    y = torch.arange(count + 2000) % CLASSES
    x = torch.nn.functional.interpolate(patterns, scale_factor=4)[y]
    noise = 64 * torch.randn(len(y), 3, 8, 8, generator=generator)
    x = (x + torch.nn.functional.interpolate(noise, scale_factor=4)).clamp_(0, 255).to(torch.uint8)
    return lab.Arrays(x[:count], y[:count], x[count:], y[count:], classes=CLASSES, name="synthetic images")


def write_work(subject: Subject, folder: Path, rounds: int, data: Data = None) -> str:
    """Write the subject as files that the peers load. Returns the data set's name.

    The same initial weights, the same samples for each client, the same mini-batches in the same order.
    """
    experiment = subject.experiment(data)
    site = lab.Site.of(experiment, data)
    dataset, local = site.dataset, experiment.local
    folder.mkdir(parents=True, exist_ok=True)
    for name, x, y in (("", dataset.x, dataset.y), ("test_", dataset.test_x, dataset.test_y)):
        np.save(folder / f"{name}x.npy", dataset.inputs(x).numpy())
        np.save(folder / f"{name}y.npy", y.numpy())
    held = [site.shards[node].train for node in experiment.nodes]
    orders = [
        torch.stack([site.order(n, r, subject.iterations, local.batch, site.samples(n)) for n in experiment.nodes])
        for r in range(rounds)
    ]
    np.savez(
        folder / "work.npz",
        initial=site.layout.flat(site.module).numpy(),
        rows=torch.cat(held).numpy(),
        cuts=np.cumsum([len(own) for own in held])[:-1],
        orders=torch.stack(orders).numpy(),
    )
    optimizer = local.optimizer
    settings = {
        "model": subject.model,
        "optimizer": "sgd" if subject.model == "mlp" else "adam",
        "learning_rate": optimizer.learning_rate,
        "epsilon": getattr(optimizer, "epsilon", None),
    }
    (folder / "work.json").write_text(json.dumps(settings), encoding="utf-8")
    return dataset.name
