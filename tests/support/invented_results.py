# SPDX-License-Identifier: Apache-2.0
"""Invented results of the reproduction's conditions, shaped as the paper tells it: for tests, marked `synthetic`."""

import dataclasses

import numpy as np

from fedvitals_studies.reproduce.conditions import CONDITIONS
from fedvitals_studies.reproduce.results import checked

COMMIT = "0123456"


def synthetic(condition):
    return dataclasses.replace(condition, dataset="synthetic")


def measure(condition, repeat, *, data=None, progress=None):
    """A result such as the paper would lead one to expect; the same for the same condition and repeat."""
    rng = np.random.default_rng([repeat, *condition.name.encode()])
    if progress is not None:
        for number in range(condition.rounds):
            progress(number + 1, condition.rounds)
    return checked(
        {
            "condition": condition.name, "study": condition.study, "topology": condition.topology,
            "scenario": condition.scenario, "clipped": condition.clipped, "repeat": repeat, "seed": 100 + repeat,
            "dataset": condition.dataset, "digest": "invented", "clients": condition.clients,
            "rounds": condition.rounds, "iterations": condition.iterations, "commit": COMMIT,
            "seconds": condition.client_steps * 0.003, "engine": "invented", "device": "cpu",
            "settings": condition.settings,
            "series": series(condition, rng, whole=condition.study == "extended" and not repeat),
        },
        condition,
        repeat,
    )  # fmt: skip


def all_results(repeats=2, conditions=CONDITIONS):
    return [measure(synthetic(condition), repeat) for condition in conditions for repeat in range(repeats)]


def series(condition, rng, *, whole=False):
    rounds = np.arange(1, condition.rounds + 1)
    accuracy = {"baseline": 0.97 * (1 - np.exp(-rounds / 4)), "exploding": 0.7 * (1 - np.exp(-rounds / 9))}.get(
        condition.scenario, rng.uniform(0.005, 0.057, condition.rounds)
    )
    if condition.scenario == "exploding":
        accuracy = np.clip(accuracy - rng.exponential(0.08, condition.rounds), 0.01, 1)
    elif condition.scenario == "baseline":
        accuracy = accuracy + rng.normal(0, 0.002, condition.rounds)
        if not condition.clipped:
            size = {"hierarchical": 0.25, "rings": 0.2}.get(condition.topology, 0.03)
            accuracy[rng.choice(condition.rounds - 1, min(3, condition.rounds - 1), replace=False) + 1] -= size
    gsc, layers = scale(condition, rng, condition.rounds)
    found = {
        "server.accuracy": accuracy * 0.93, "server.loss": -np.log(np.maximum(accuracy * 0.93, 1e-3)),
        "aggregated.accuracy": accuracy, "aggregated.loss": -np.log(np.maximum(accuracy, 1e-3)),
        "groups": np.full(condition.rounds, {"hierarchical": 5, "rings": 33}.get(condition.topology, 1)),
        "bytes.server": np.full(condition.rounds, condition.clients * 2 * 160_000),
        "bytes.edge": np.full(condition.rounds, 6.4e8 if condition.topology == "hierarchical" else 0),
        "scale.gsc": gsc, "scale.gsc_median": 0.8 * gsc, "scale.gsc_spread": 0.6 * gsc,
        "scale.zero_samples": (gsc == 0).astype(float), "scale.nonfinite_samples": np.zeros(condition.rounds),
        "scale.sensitivity": np.where(gsc > 1e3, 0.03, np.where(gsc > 0, 0.2, 0)) * rng.uniform(0.9, 1.1, gsc.size),
        "nonlinearity.nlc": np.where(gsc > 0, 1.5, np.nan), **layers,
    }  # fmt: skip
    if condition.whole_set:
        found |= {name.replace("gradient.", "gradient.full."): values for name, values in layers.items()}
    if condition.every_iteration:
        found |= iterations(condition, rng)
    if whole:
        found |= {"scale.gsc_whole": 1.1 * gsc, "scale.gsc_exact": np.where(rounds % 5 == 1, 1.11 * gsc, np.nan)}
    return plain(found)


def scale(condition, rng, points):
    """GSC and the layers' gradients, after the measured table of science.md, section 1."""
    grown = np.linspace(0, 1, points)
    low, high, means, sizes = {
        "baseline": (0.014, 0.95, (-1e-2, 1e-3, 1e-11), (2.5e-2, 2.6e-3, 1e-3)),
        "exploding": (1.4e10, 8.5e11, (1.3e2, 5.8, -1e-5), (1.3e2, 11, 1e4)),
        "vanishing": (0, 0, (0, 0, -1e-8), (0, 0, 2e-2)),
    }[condition.scenario]
    gsc = (low ** (1 - grown) * high**grown if low else np.zeros(points)) * rng.lognormal(0, 0.1, points)
    layers = {
        "gradient.mean": {str(i + 1): mean * rng.normal(0.5, 1, points) for i, mean in enumerate(means)},
        "gradient.magnitude": {str(i + 1): size * rng.lognormal(0, 0.3, points) for i, size in enumerate(sizes)},
    }
    return gsc, layers


def iterations(condition, rng):
    points = condition.rounds * condition.iterations
    within = np.tile(np.linspace(0, 1, condition.iterations), condition.rounds)
    gsc, layers = scale(condition, rng, points)
    loss, signed, absolute, starts = {}, {}, {}, {}
    for edge in range(5):
        name = f"edge-{edge}"
        loss[name] = 3.7 * np.exp(-np.arange(points) / points * 3) * rng.lognormal(0, 0.003, points)
        absolute[name] = (20 - 8 * within) * rng.lognormal(0, 0.03, points)
        if not condition.clipped and condition.rounds > 4:
            begin = condition.iterations * int(rng.integers(3, condition.rounds - 1)) + 4
            end = begin + condition.iterations - 4
            loss[name][begin:end] *= np.linspace(1.5, 4, end - begin)
            absolute[name][begin:end] *= 2.5
        starts[name] = loss[name].reshape(condition.rounds, -1)[:, 0] * 1.02
        signed[name] = absolute[name] * rng.normal(0, 0.2, points)
    return {
        "iteration.loss": loss, "iteration.difference": signed, "iteration.difference_absolute": absolute,
        "iteration.gsc": gsc * np.exp(within), **{f"iteration.{name}": values for name, values in layers.items()},
        "iteration.test_loss": loss, "start.test_loss": starts,
        **{f"iteration.{name.replace('gradient.', 'gradient.full.')}": values for name, values in layers.items()},
    }  # fmt: skip


def plain(value):
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [float(entry) if np.isfinite(entry) else None for entry in value]
