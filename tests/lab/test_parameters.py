# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters never move or travel, and what stays at home is each client's own."""

import pytest
import torch
from torch import nn

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.run import prepare_site
from fedvitals.lab.streams import stream

SIZES = {"dataset": lab.synthetic(samples=240), "model": lab.mlp(hidden=(12,)), "clients": 4, "rounds": 3, "seed": 3}
LOCAL = lab.Local(iterations=4, optimizer=lab.sgd(0.1))


def experiment(parameters, **changes):
    return lab.Experiment(**{**SIZES, "local": LOCAL, "parameters": parameters, **changes})


def names(**changes):
    return prepare_site(experiment(lab.Parameters(), **changes)).layout.names


FIRST, LAST = names()[0].rpartition(".")[0], names()[-1].rpartition(".")[0]


def test_patterns_say_what_trains():
    whole = names()
    bias_only = prepare_site(experiment(lab.Parameters(frozen=("*",), trained=("*.bias",)))).layout.names  # BitFit
    assert bias_only == tuple(name for name in whole if name.endswith("bias"))
    site = prepare_site(experiment(lab.Parameters(frozen=(f"{FIRST}.weight",), at_home=(f"{LAST}.*",))))
    assert site.home.names == tuple(name for name in whole if name.startswith(LAST))
    assert site.layout.names == (f"{FIRST}.bias",)


@pytest.mark.parametrize("engine", ["sequential", "reuse", "stacked"])
def test_frozen_layers_stay_and_the_others_train_as_without_gradients_of_them(engine):
    """The twin trains everything and puts the frozen layer back after each step, which for SGD is the same."""
    e = experiment(lab.Parameters(frozen=(f"{FIRST}.*",)), clients=1, rounds=1, test_share=0.0)
    site = prepare_site(e)
    result = lab.run(e, engine=engine, workers=1)
    twin = prepare_site(experiment(None, clients=1, rounds=1, test_share=0.0)).module
    x, y = site.tensors("c0", 0)
    for rows in site.order("c0", 0, 4, LOCAL.batch, len(y)):
        twin.zero_grad()
        nn.functional.cross_entropy(twin(x[rows]), y[rows]).backward()
        with torch.no_grad():
            for name, p in twin.named_parameters():
                p.sub_(p.grad, alpha=0.0 if name.startswith(FIRST) else 0.1)
    for (name, found), expected in zip(result.model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)
        assert found.requires_grad is not name.startswith(FIRST)


def test_homes_are_each_clients_own_and_never_averaged():
    """The twin keeps a module for each client, and averages all but the head by hand."""
    e = experiment(lab.Parameters(at_home=(f"{LAST}.*",)))
    site = prepare_site(e)
    result = lab.run(e, engine="sequential")
    modules = {node: prepare_site(experiment(None)).module for node in e.nodes}
    for number in range(e.rounds):
        for node, module in modules.items():
            x, y = site.tensors(node, number)
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            for rows in site.order(node, number, 4, LOCAL.batch, len(y)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
                optimizer.step()
        samples = {node: site.samples(node) for node in e.nodes}
        for name in site.layout.names:
            mean = sum(samples[n] * modules[n].get_parameter(name).detach() for n in e.nodes) / sum(samples.values())
            for module in modules.values():
                module.get_parameter(name).data.copy_(mean)
    torch.testing.assert_close(result.state, site.layout.flat(modules["c0"]), rtol=1e-5, atol=1e-6)
    right = total = 0
    for node, module in modules.items():
        held = site.shards[node].test
        x, y = site.dataset.pairs(site.dataset.x[held], site.dataset.y[held])
        right, total = right + int((module(x).argmax(1) == y).sum()), total + len(y)
    assert result.rounds[-1].metrics["local.accuracy"] == pytest.approx(right / total)
    assert "accuracy" not in result.rounds[-1].metrics


@pytest.mark.parametrize("topology", [lab.Centralized(), lab.Hierarchical(edges=2), lab.Rings(), lab.Clustered()])
def test_homes_are_the_same_for_any_number_of_workers_and_after_a_resumption(topology, tmp_path):
    e = experiment(lab.Parameters(at_home=(f"{LAST}.*",)), topology=topology, participation=0.75)
    whole = lab.run(e, engine="reuse", workers=1)
    again = lab.run(e, engine="reuse", workers=2)
    for result in lab.rounds(e, engine="reuse", workers=1, checkpoint=tmp_path):
        if len(result.rounds) == 1:
            break
    resumed = lab.run(e, engine="reuse", workers=1, checkpoint=tmp_path, resume=True)
    for other in (again, resumed):
        assert torch.equal(other.state, whole.state)
        assert [r.metrics for r in other.rounds] == [r.metrics for r in whole.rounds]


def test_shifted_gradients_leave_the_home_alone():
    e = experiment(lab.Parameters(at_home=(f"{LAST}.*",)), aggregator="scaffold")
    one = lab.run(e, engine="sequential")
    torch.testing.assert_close(lab.run(e, engine="reuse", workers=2).state, one.state, rtol=1e-4, atol=1e-5)


def test_a_failed_client_keeps_the_home_that_it_had():
    faults = [lab.crash(nodes=["c1"], since=1, at_step=2)]
    e = experiment(lab.Parameters(at_home=(f"{LAST}.*",)), faults=faults)
    one = lab.run(e, engine="reuse", workers=1)
    assert torch.equal(lab.run(e, engine="reuse", workers=2).state, one.state)


def test_batch_norm_at_home_is_fedbn():
    model = lab.cnn(norm="batch", channels=(4, 4))
    data = lab.Arrays(torch.rand(80, 1, 8, 8, generator=stream(0, "x")), torch.arange(80) % 3)
    e = experiment(lab.Parameters(at_home=("*norm*",)), dataset=data, model=model)
    site = prepare_site(e)
    assert any(name.endswith("running_var") for name in site.home.names)
    assert site.layout.weights == site.layout.size
    lab.run(e, engine="sequential")


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="No tensor of the model is called 'haed"):
        lab.run(experiment(lab.Parameters(at_home=("haed.*",))))
    with pytest.raises(ConfigError, match="Nothing of this model"):
        lab.run(experiment(lab.Parameters(frozen=("*",))))
    with pytest.raises(ConfigError, match="no whole"):
        experiment(lab.Parameters(at_home=("x",)), test_share=0.0)
    with pytest.raises(ConfigError, match=r"cannot be stacked.*stay at home"):
        lab.run(experiment(lab.Parameters(at_home=(f"{LAST}.*",))), engine="stacked")


def test_the_same_in_toml():
    lora = lab.lora(4, 8.0, ("dense*",), {"c0": 2}, {"c1": 3.0}, "exact")
    for parameters in (lab.Parameters(adapters=lora), lab.Parameters(("a.*",), ("a.b",), ("c",))):
        e = experiment(parameters)
        assert lab.read(e.to_toml()) == e
