# SPDX-License-Identifier: Apache-2.0
"""The stacked engine on CUDA against its twin, client by client on a CPU."""

import itertools

import pytest
import torch

from fedvitals import lab
from fedvitals.lab.stacked import cuda_round as stacked_cuda
from support.gpu_data import images

pytestmark = pytest.mark.gpu

MODELS = {
    "paper": lab.paper_cnn(channels=(8, 16)),
    "exploding": lab.paper_cnn(scenario="exploding", channels=(4, 8)),
    "vanishing": lab.paper_cnn(scenario="vanishing", channels=(4, 8)),
    "cnn": lab.cnn(channels=(4, 8)),
    "mlp": lab.mlp(hidden=(16, 8)),
    "logistic": lab.logistic(),
    "resnet": lab.resnet18(),
    "transformer": lab.transformer(width=16, heads=2, layers=1),
}
OPTIMIZERS = {
    "adam": lab.adam(),
    "sgd": lab.sgd(learning_rate=0.05),
    "momentum": lab.sgd(learning_rate=0.05, momentum=0.9),
}
TOPOLOGIES = {"centralized": lab.Centralized(), "hierarchical": lab.Hierarchical(edges=2), "rings": lab.Rings(rings=2),
              "clustered": lab.Clustered()}  # fmt: skip


def there():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


def experiment(model, *, clients=4, rounds=1, seed=1, **more):
    local = {"iterations": 4, "batch": 8, "optimizer": lab.adam()} | more.pop("local", {})
    data = more.pop("dataset", None) or images()
    more |= {"clients": clients, "rounds": rounds, "seed": seed}
    return lab.Experiment(dataset=data, model=model, local=lab.Local(**local), **more)


def moved(e, **how):
    """The last model less the first, and what the first rounds' losses were."""
    result = lab.run(e, **how)
    first = lab.Site.of(e)
    return result.state - first.layout.flat(first.module), result


def far(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", [*MODELS])
def test_one_round_of_each_model_is_that_of_the_twin(name):
    there()
    # Adam divides by the size of a gradient: where that is rounding, so is the step. SGD shows what is computed.
    e = experiment(MODELS[name], local={"optimizer": lab.sgd(learning_rate=1e-6 if name == "exploding" else 0.01)})
    ours, result = moved(e, engine="stacked", device="cuda")
    theirs, _ = moved(e, engine="sequential")
    assert result.engine == "stacked"
    assert far(ours, theirs) < 1e-3


@pytest.mark.parametrize("name", [f"{o}/{t}" for o, t in itertools.product(OPTIMIZERS, TOPOLOGIES)])
def test_optimisers_and_topologies_are_those_of_the_twin(name):
    there()
    optimizer, topology = name.split("/")
    e = experiment(MODELS["paper"], clients=6, topology=TOPOLOGIES[topology],
                   local={"optimizer": OPTIMIZERS[optimizer], "clip": lab.Clip(0.2)})  # fmt: skip
    assert far(moved(e, engine="stacked", device="cuda")[0], moved(e, engine="sequential")[0]) < 5e-3


@pytest.mark.parametrize("name", ["tensor", "whole", "value"])
def test_clipping_is_that_of_the_twin(name):
    there()
    e = experiment(MODELS["cnn"], local={"optimizer": OPTIMIZERS["sgd"], "clip": lab.Clip(0.02, by=name)})
    assert far(moved(e, engine="stacked", device="cuda")[0], moved(e, engine="sequential")[0]) < 1e-3


def test_unequal_clients_need_one_graph():
    there()
    local = {"iterations": None, "epochs": 2, "optimizer": OPTIMIZERS["momentum"], "proximal": 0.1}
    e = experiment(MODELS["cnn"], clients=6, rounds=2, partition=lab.dirichlet(0.4), local=local)
    assert far(moved(e, engine="stacked", device="cuda")[0], moved(e, engine="sequential")[0]) < 1e-3


def test_the_same_seed_gives_the_same_bits():
    there()
    e = experiment(MODELS["paper"], rounds=3, clients=6, topology=TOPOLOGIES["hierarchical"])
    first, again = (lab.run(e, engine="stacked", device="cuda").state for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize("name", ["tf32", "bfloat16"])
def test_coarser_numbers_stay_near(name):
    there()
    for model in ("paper", "mlp", "resnet"):
        e = experiment(MODELS[model], local={"optimizer": OPTIMIZERS["sgd"]})
        coarse = moved(e, engine="stacked", device="cuda", precision=name)[0]
        distance = far(coarse, moved(e, engine="stacked", device="cuda")[0])
        assert 0 < distance < (0.2 if name == "tf32" else 0.5), (model, distance)


def test_more_clients_than_fit_train_in_portions():
    there()
    e = experiment(MODELS["mlp"], clients=40, rounds=2)
    whole = lab.run(e, engine="stacked", device="cuda").state
    held, stacked_cuda._SHARE = stacked_cuda._SHARE, 1e-9
    stacked_cuda._most.clear()
    try:
        parts = lab.run(e, engine="stacked", device="cuda").state
        assert set(stacked_cuda._most.values()) == {1}
    finally:
        stacked_cuda._SHARE = held
        stacked_cuda._most.clear()
    assert far(parts, whole) < 1e-4


def test_accuracy_after_twenty_rounds_is_within_the_spread_of_repeats():
    there()
    found = {"cuda": [], "cpu": []}
    for seed in range(4):
        e = experiment(MODELS["cnn"], clients=8, rounds=20, seed=seed, dataset=images(1200, seed=7))
        found["cuda"].append(lab.run(e, engine="stacked", device="cuda").accuracy)
        found["cpu"].append(lab.run(e, engine="reuse").accuracy)
    ours, theirs = (torch.tensor(found[where]) for where in ("cuda", "cpu"))
    assert abs(float(ours.mean() - theirs.mean())) <= float(theirs.max() - theirs.min()) + 0.01, found


@pytest.mark.parametrize("name", ["lstm", "batch norm"])
def test_what_cannot_be_stacked_falls_back_and_says_so(name):
    there()
    from fedvitals.protocols import NullObserver

    class Listening(NullObserver):
        heard = ()

        def event(self, level, name, message, **_):
            self.heard = (*self.heard, (level, name, message))

    listening = Listening()
    model = lab.lstm(hidden=8) if name == "lstm" else lab.resnet18(norm="batch")
    result = lab.run(experiment(model, clients=2, local={"iterations": 1}), listening, device="cuda", workers=1)
    assert result.engine == "reuse"
    assert any(event == "device.fallback" and "one by one on the CPU" in text for _, event, text in listening.heard)
