# SPDX-License-Identifier: Apache-2.0
"""The training script of the study's sites; one of them may have a fault. NVFlare copies this file into its jobs.

Faults: `fail` raises, `slow` trains longer than the server waits, `kill` ends the process, `nan` sends NaN, `noise`
trains on shuffled labels.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

import nvflare.client as flare
import torch
from digits_model import DigitsModel
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader, TensorDataset

import fedvitals as fv


class PlantedError(Exception):
    """The exception of the fault `fail`."""


def samples_of(share: int, shares: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return one site's digits, and their labels."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return x[share::shares], y[share::shares]


def train(model: torch.nn.Module, x: Tensor, y: Tensor, *, watched: bool) -> tuple[float, int]:
    """Train for an epoch. Returns the mean loss and the number of steps."""
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def epoch() -> float:
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total / len(loader)

    if not watched:
        return epoch(), len(loader)
    with fv.watch(model, optimizer, data=loader, loss=F.cross_entropy):
        return epoch(), len(loader)


def plant(fault: str, params: dict[str, Any]) -> None:
    """Apply the site's fault in a round in which it shows."""
    if fault == "fail":
        raise PlantedError("planted on purpose")
    if fault == "slow":
        time.sleep(25)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "nan":
        next(iter(params.values())).view(-1)[:3] = float("nan")


def main() -> None:
    """Train until the server has no more rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", default="none")
    parser.add_argument("--faulty", default="site-3")
    parser.add_argument("--since", type=int, default=2)
    parser.add_argument("--watched", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    flare.init()
    site = flare.get_site_name()
    share = int(site.removeprefix("site-")) - 1
    torch.manual_seed(1000 * options.seed + share)
    x, y = samples_of(share, options.sites, options.seed)
    mixed_up = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))]
    model = DigitsModel()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        faulty = site == options.faulty and (received.current_round or 0) >= options.since
        model.load_state_dict({name: torch.as_tensor(values) for name, values in received.params.items()})
        labels = mixed_up if faulty and options.fault == "noise" else y
        loss, steps = train(model, x, labels, watched=bool(options.watched))
        params = {name: values.detach().clone() for name, values in model.state_dict().items()}
        if faulty:
            plant(options.fault, params)
        meta = {"NUM_STEPS_CURRENT_ROUND": steps}
        flare.send(flare.FLModel(params=params, metrics={"train_loss": loss}, meta=meta))


if __name__ == "__main__":
    main()
