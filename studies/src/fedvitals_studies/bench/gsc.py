# SPDX-License-Identifier: Apache-2.0
"""The cost and the error of the gradient scale: each method on one trained client of the paper's CNN.

Cost is CPU time relative to the client's own 20 local iterations, interleaved. Two errors are distinguished: the
estimator's, against the exact value on the same images, and the sampling error of using 16 images instead of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedvitals.lab.engines.training import clip_gradients as clipped
from fedvitals.lab.local import Clip
from fedvitals.probes.differentiate import differentiable
from fedvitals.probes.scale import IMAGES, estimated_squares, gradient_scale
from fedvitals.probes.view import evaluation_mode
from fedvitals_studies.bench import gtsrb
from fedvitals_studies.bench.workloads import WORKLOADS, paper_cnn, step

ITERATIONS, BATCH = 20, 16
CLIENT = 313  # images of one client of the paper


def bench_gsc(
    *, quick: bool = False, data: str | None = None, tell: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Return a table's rows, one per method; the first row names the data."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = gtsrb.folder(data)
        x, y = gtsrb.load(data, CLIENT) if found else WORKLOADS[1].data(CLIENT)
        tell(f"data: {'real GTSRB' if found else 'random images, since GTSRB was not found'}")
        model = trained(x, y, rounds=2 if quick else 8)
        return _rows(model, x, y, "GTSRB" if found else "random images", 3 if quick else 9, tell)
    finally:
        torch.set_num_threads(threads)


def trained(
    x: Tensor, y: Tensor, rounds: int, scenario: Literal["baseline", "exploding", "vanishing"] = "baseline"
) -> nn.Module:
    """Return one client trained for some rounds of the paper: 20 iterations each, Adam, its scenario's clipping."""
    torch.manual_seed(0)
    model = paper_cnn(scenario)
    for number in range(rounds):
        local_iterations(model, x, y, number, clip=1.0 if scenario == "baseline" else None)
    return model


def local_iterations(model: nn.Module, x: Tensor, y: Tensor, number: int, *, clip: float | None = None) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-7)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(number))
    for i in range(ITERATIONS):
        batch = order[torch.arange(i * BATCH, (i + 1) * BATCH) % len(order)]
        if clip is None:
            step(model, optimizer, x[batch], y[batch])
        else:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            clipped([p.grad for p in model.parameters() if p.grad is not None], Clip(clip))
            optimizer.step()


def _rows(
    model: nn.Module, x: Tensor, y: Tensor, where: str, repeats: int, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    some = x[:IMAGES]
    methods: dict[str, Callable[[], Any]] = {
        "20 local iterations": lambda: local_iterations(_copy(model), x, y, 0),
        "exact, all images": lambda: gradient_scale(model, x, exact=True),
        f"exact, {IMAGES} images": lambda: gradient_scale(model, some, exact=True),
        f"deflated, {IMAGES} images": lambda: gradient_scale(model, some),
        f"plain projection, {IMAGES} images": lambda: _plain(model, some, 0),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(repeats):
        for name, method in methods.items():
            if name == "exact, all images" and turn > 2:
                continue  # a minute each
            tell(f"{name} ({turn + 1} of {repeats})")
            started = time.process_time()
            method()
            times[name].append(time.process_time() - started)
    seconds = {name: float(np.median(found)) for name, found in times.items()}
    errors = _errors(model, x)
    common = {"data": where, "images": len(x)}
    return [
        {
            **common,
            "method": name,
            "milliseconds": 1e3 * spent,
            "of_20_iterations": spent / seconds["20 local iterations"],
            "cheaper_than_exact": seconds["exact, all images"] / spent if "images" in name else None,
            "estimator_error_percent": errors.get(name),
            "sampling_error_percent": errors["sampling"] if f"{IMAGES} images" in name else None,
        }
        for name, spent in seconds.items()
    ]


def _errors(model: nn.Module, x: Tensor, draws: int = 50) -> dict[str, float]:
    """Return mean absolute errors in percent: of each estimate on the same images, and of the mean over few images."""
    some = x[:IMAGES]
    exact = float(gradient_scale(model, some, exact=True)[0].mean())
    found = {}
    estimates: dict[str, Callable[[int], Tensor]] = {
        f"deflated, {IMAGES} images": lambda seed: gradient_scale(model, some, seed=seed)[0],
        f"plain projection, {IMAGES} images": lambda seed: _plain(model, some, seed),
    }
    for name, estimate in estimates.items():
        values = np.array([float(estimate(seed).mean()) for seed in range(draws)])
        found[name] = 100 * float(np.abs(values / exact - 1).mean())
    all_of_them = gradient_scale(model, x)[0].numpy()
    choose = np.random.default_rng(0)
    means = np.array([choose.choice(all_of_them, IMAGES, replace=False).mean() for _ in range(1000)])
    found["sampling"] = 100 * float(np.abs(means / all_of_them.mean() - 1).mean())
    return found


def _plain(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    """Return GSC from two random projections without deflation, as a reference for it."""
    with evaluation_mode(model), differentiable(model, x) as graph:
        squares = estimated_squares(graph, None, seed)
        top, bottom = graph.outputs.detach().double(), graph.inputs.detach().flatten(1).double()
        ratio: Tensor = torch.linalg.vector_norm(top, dim=1) / torch.linalg.vector_norm(bottom, dim=1)
    return (squares / x[0].numel()).sqrt() * ratio


def _copy(model: nn.Module) -> nn.Module:
    fresh = paper_cnn()
    fresh.load_state_dict(model.state_dict())
    return fresh
