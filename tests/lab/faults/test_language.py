# SPDX-License-Identifier: Apache-2.0
"""Faults of language models: what they do to adapters and texts, and that they are refused without them."""

import pytest
import torch

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.engines.engine import Engine
from fedvitals.lab.faults.fault import Fault
from fedvitals.lab.faults.language import FAULTS
from fedvitals.lab.federation import Federation, ServerState
from fedvitals.lab.run import prepare_site
from fedvitals.protocols import NullObserver

TEXT = lab.synthetic(targets="tokens", sequence=10, vocabulary=8, samples=120)
GPT = lab.gpt(width=8, heads=2, layers=1)


def experiment(*faults, **changes):
    return lab.Experiment(
        **{"dataset": TEXT, "model": GPT, "clients": 3, "rounds": 1, "faults": faults}
        | {"local": lab.Local(iterations=2), "parameters": lab.Parameters(adapters=lab.lora(rank=4))}
        | changes
    )


def states(e, engine="sequential"):
    """The site, and each client's state and steps after one round of training."""
    site = prepare_site(e)
    start = site.layout.flat(site.module)
    start = start + 0.1 * (start == 0)  # as if the server had learnt something
    with Engine(site, engine, workers=1) as doing:
        federation = Federation(site, doing, NullObserver(), ServerState(start))
        tasks = [lab.Task(0, (node,), start) for node in e.nodes]
        return site, {u.node: (u.state.clone(), u.steps) for u in federation.train(tasks)}


@pytest.mark.parametrize("engine", ["sequential", "reuse", "stacked"])
def test_a_collapsed_adapter_has_one_direction(engine):
    site, found = states(experiment(lab.rank_collapse(nodes=["c1"])), engine)
    _, healthy = states(experiment(), engine)
    for node in ("c0", "c2"):
        assert torch.equal(found[node][0], healthy[node][0])
    for node, rank in (("c0", 4), ("c1", 1)):
        views = site.layout.views(found[node][0])
        for name in views:
            if name.endswith("lora_A.weight"):
                product = views[name.replace("lora_A", "lora_B")] @ views[name]
                assert torch.linalg.matrix_rank(product.double(), rtol=1e-6) <= rank
    assert not torch.equal(found["c1"][0], healthy["c1"][0])


def test_a_wrong_scale_is_that_of_another_alpha():
    wrong = experiment(lab.adapter_scale(nodes=["c1"], factor=3.0))
    other = experiment(parameters=lab.Parameters(adapters=lab.lora(rank=4, alpha=16.0, alphas={"c1": 48.0})))
    _, found = states(wrong)
    _, expected = states(other)
    _, healthy = states(experiment())
    assert torch.equal(found["c1"][0], expected["c1"][0])
    assert torch.equal(found["c0"][0], healthy["c0"][0])
    assert not torch.equal(found["c1"][0], healthy["c1"][0])
    with pytest.raises(ConfigError, match="α/r for each client"):
        lab.run(wrong, engine="stacked", workers=1)


def test_who_forgets_sees_few_samples_and_trains_longer():
    fault = lab.forgetting(nodes=["c1"], samples=2, factor=3)
    site, found = states(experiment(fault))
    x, y = site.tensors("c1", 0)
    own, _ = prepare_site(experiment()).tensors("c1", 0)
    assert len(x) == len(y) == len(own)
    assert torch.equal(x, own[torch.arange(len(own)) % 2])
    assert [found[node][1] for node in ("c0", "c1", "c2")] == [2, 6, 2]
    assert fault.local(lab.Local(epochs=2)).epochs == 6


def test_padding_is_learnt_and_cut_texts_are_ignored():
    x, y = torch.arange(1, 21).view(2, 10), torch.arange(2, 22).view(2, 10)
    padded_x, padded_y = lab.padding(nodes=["c0"], share=0.3).data(x, y, 30, torch.Generator())
    assert torch.equal(padded_x, torch.cat([x[:, :7], torch.zeros(2, 3, dtype=x.dtype)], 1))
    assert torch.equal(padded_y, torch.cat([y[:, :7], torch.zeros(2, 3, dtype=x.dtype)], 1))
    cut_x, cut_y = lab.short_texts(nodes=["c0"], share=0.2).data(x, y, 30, torch.Generator())
    assert torch.equal(cut_x[:, :2], x[:, :2])
    assert torch.equal(cut_y[:, :2], y[:, :2])
    assert cut_y[:, 2:].unique().tolist() == [-100]
    _, tiny = lab.short_texts(nodes=["c0"], share=0.01).data(x, y, 30, torch.Generator())
    assert (tiny != -100).sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("kind", FAULTS)
def test_engines_agree_and_the_fault_is_the_same_in_toml(kind):
    e = experiment(kind(nodes=["c1"]))
    assert lab.read(e.to_toml()) == e
    assert type(kind.__dict__.get("family", kind.family)) is str
    one = lab.run(e, engine="sequential").state
    torch.testing.assert_close(lab.run(e, engine="reuse", workers=1).state, one, rtol=1e-4, atol=1e-5)
    if kind.scale is Fault.scale:
        torch.testing.assert_close(lab.run(e, engine="stacked", workers=1).state, one, rtol=1e-4, atol=1e-5)


def test_they_are_refused_where_they_cannot_act():
    for fault in (lab.rank_collapse(nodes=["c1"]), lab.adapter_scale(nodes=["c1"])):
        with pytest.raises(ConfigError, match="no low-rank adapters"):
            lab.run(experiment(fault, parameters=None))
    for fault in (lab.padding(nodes=["c1"]), lab.short_texts(nodes=["c1"])):
        with pytest.raises(ConfigError, match="needs tokens"):
            lab.run(lab.Experiment(dataset=lab.synthetic(), model="mlp", faults=[fault]))
    with pytest.raises(ConfigError, match="another number than 1"):
        lab.adapter_scale(nodes=["c1"], factor=1)
