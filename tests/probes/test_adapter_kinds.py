# SPDX-License-Identifier: Apache-2.0
"""Adapters as peft makes them, in small federations: other layers per client, several per layer, half precision."""

import copy

import pytest
import torch
from torch import nn

from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.weights import check_initialisation
from fedvitals.testing import MemorySink

peft = pytest.importorskip("peft", reason="peft is not installed")
PATTERN = {"lora_alpha": 8, "alpha_pattern": {"2": 32}}  # α/r 2 and 8


def adapted(targets=("0", "2"), config=peft.LoraConfig, **settings):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 16))
    rank = {"r": 4} if config is peft.LoraConfig else {}
    return peft.get_peft_model(base, config(target_modules=[*targets], **rank, **settings))


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def federate(tmp_path, model, clients, rounds=3, weights=None, before=lambda number, models: None):
    """Train clients on random targets; each tensor is averaged over the clients that train it.

    Returns the sink, the findings, and the clients' last states.
    """
    sink, generator = MemorySink(), torch.Generator().manual_seed(1)
    monitor = Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True)
    for number in range(rounds):
        before(number, [model, *clients])
        with monitor.round(number, model):
            sent, states = trained(model), []
            for place, own in enumerate(clients):
                with torch.no_grad():
                    for name, parameter in trained(own).items():
                        parameter.copy_(sent[name])
                optimizer = torch.optim.Adam(trained(own).values(), 0.02, eps=1e-4)  # in float16, 1e-8 is 0
                with monitor.client(f"c{place}", own):
                    for _ in range(3):
                        x = torch.randn(8, 20, generator=generator).to(next(own.parameters()).dtype)
                        optimizer.zero_grad()
                        (own(x) - x[:, :16] * place).square().mean().backward()
                        optimizer.step()
                states.append({name: p.detach().clone() for name, p in trained(own).items()})
            with torch.no_grad():
                for name, parameter in sent.items():
                    own_states = [(w, s[name]) for w, s in zip(weights or [1.0] * 9, states, strict=False) if name in s]
                    total = sum(w for w, _ in own_states)
                    parameter.copy_(sum(w / total * p.float() for w, p in own_states))
    monitor.flush()
    findings = monitor.findings()
    monitor.close()
    return sink, {finding.issue for finding in findings}, states


def metrics_of(sink, node, round_index):
    return {r.name: r.value for r in sink.metrics() if (r.where.node, r.where.round) == (node, round_index)}


def error_of(model, states, layer, weights):
    """Return the error of a layer's aggregated product, from the products."""
    names = [f"base_model.model.{layer}.lora_{side}.default.weight" for side in "BA"]
    mean = sum(w * s[names[0]].double() @ s[names[1]].double() for w, s in zip(weights, states, strict=True))
    own = {name: p.detach() for name, p in trained(model).items()}
    return float((own[names[0]].double() @ own[names[1]].double() - mean).norm() / mean.norm())


def test_clients_that_adapt_other_layers_are_measured_by_those_they_have(tmp_path):
    model = adapted(**PATTERN)
    clients = [adapted(**PATTERN), adapted(**PATTERN), adapted(["0"], lora_alpha=8), adapted(["0"], lora_alpha=8)]
    sink, issues, states = federate(tmp_path, model, clients)
    measured = metrics_of(sink, "server", 2)
    errors = [error_of(model, states, 0, [0.25] * 4), error_of(model, states[:2], 2, [0.5] * 2)]
    assert measured["adapter.product_error"] == pytest.approx(sum(errors) / 2, rel=1e-5)
    assert metrics_of(sink, "c2", 2)["adapter.scale"] != measured["adapter.scale"]  # means over other layers
    assert metrics_of(sink, "c2", 2)["update.adapter_scale"] == 1.0
    assert "update.adapter_scale" not in metrics_of(sink, "c0", 2)
    assert not issues & {"ADAPTER_SCALE_MISMATCH", "DEAD_ADAPTER", "ADAPTER_AGGREGATION_BIAS"}


def test_another_scale_on_some_of_the_layers_is_still_a_mismatch(tmp_path):
    clients = [adapted(**PATTERN), adapted(**PATTERN), adapted(**PATTERN), adapted(["0"], lora_alpha=32)]
    sink, issues, _ = federate(tmp_path, adapted(**PATTERN), clients)
    assert metrics_of(sink, "c3", 2)["update.adapter_scale"] == 4.0
    assert "ADAPTER_SCALE_MISMATCH" in issues


def test_an_adapter_that_is_not_active_is_not_dead(tmp_path):
    def several():
        model = adapted(lora_alpha=8)
        model.add_adapter("other", peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"]))
        return model

    def switch(number, models):
        for model in models:
            model.set_adapter("default" if number < 2 else "other")

    sink, issues, _ = federate(tmp_path, several(), [several() for _ in range(3)], rounds=5, before=switch)
    assert metrics_of(sink, "server", 4)["adapter.unmoved"] == 0
    assert "DEAD_ADAPTER" not in issues


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_error_of_adapters_in_half_precision_is_known_in_spite_of_their_rounding(tmp_path, kind):
    weights = [0.5, 0.3, 0.2]
    model = adapted(lora_alpha=8).to(kind)
    sink, issues, states = federate(tmp_path, model, [copy.deepcopy(model) for _ in range(3)], weights=weights)
    expected = (error_of(model, states, 0, weights) + error_of(model, states, 2, weights)) / 2
    assert metrics_of(sink, "server", 2)["adapter.product_error"] == pytest.approx(expected, rel=0.01)
    assert "RANK_COLLAPSE" not in issues


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (peft.LoraConfig, "4 of 8 tensors train: 2 low-rank adapters of rank 4."),
        (peft.LoHaConfig, "8 of 12 tensors train; none is the A or B of a low-rank adapter."),
        (peft.IA3Config, "2 of 6 tensors train; none is the A or B of a low-rank adapter."),
    ],
)
def test_a_run_says_what_trains_of_its_model(tmp_path, config, expected):
    settings = {"feedforward_modules": []} if config is peft.IA3Config else {}
    model = adapted(config=config, **settings)
    sink, issues, _ = federate(tmp_path, model, [copy.deepcopy(model) for _ in range(3)], rounds=2)
    (event,) = sink.events("layers.trained")
    assert (event.level, event.message, event.data["adapters"] > 0) == ("info", expected, "rank 4" in expected)
    assert ("adapter.effective_rank" in sink.names()) == (config is peft.LoraConfig)
    assert not {issue for issue in issues if "ADAPTER" in issue}


def test_a_run_says_that_adapters_are_frozen_where_only_a_head_trains(tmp_path):
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("2.base_layer.bias"))
    sink, _, _ = federate(tmp_path, model, [copy.deepcopy(model) for _ in range(2)], rounds=1)
    (event,) = sink.events("layers.trained")
    assert event.message == (
        "1 of 8 tensors trains; none is the A or B of a low-rank adapter; 2 low-rank adapters are frozen."
    )


def test_factors_that_begin_at_one_are_no_poor_initialisation():
    assert check_initialisation(adapted(config=peft.IA3Config, feedforward_modules=["2"])) == []
