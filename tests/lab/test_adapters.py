# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: what they compute, what travels, and the three ways to average them, each against a slow twin."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.adapters import LoraLinear, insert_adapters, set_scale
from fedvitals.lab.engines.engine import Engine
from fedvitals.lab.federation import Federation, ServerState
from fedvitals.lab.run import prepare_site
from fedvitals.lab.streams import stream
from fedvitals.monitor.monitor import Monitor
from fedvitals.protocols import NullObserver
from fedvitals.records import Transfer
from fedvitals.testing import MemorySink

SIZES = {"dataset": lab.synthetic(samples=200), "model": lab.mlp(hidden=(12,)), "clients": 4, "seed": 3}
RANKS = {"c0": 2, "c2": 1}


def experiment(adapters=None, **changes):
    adapters = lab.lora(rank=4, alpha=8) if adapters is None else adapters
    local = lab.Local(iterations=3, optimizer=lab.sgd(0.5))
    return lab.Experiment(
        **{**SIZES, "rounds": 2, "local": local, "parameters": lab.Parameters(adapters=adapters)} | changes
    )


def adapted(module):
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


# -- one layer --------------------------------------------------------------------------------------------------------


def test_a_layer_computes_what_its_merged_weight_does_and_begins_as_it_was():
    torch.manual_seed(0)
    dense, x = nn.Linear(6, 5), torch.randn(7, 6)
    layer = LoraLinear(dense, rank=3, scale=2.5)
    assert torch.equal(layer(x), dense(x))
    nn.init.normal_(layer.lora_B.weight)
    a, b, w = (p.detach().numpy().astype(np.float64) for p in (layer.lora_A.weight, layer.lora_B.weight, dense.weight))
    merged = w + 2.5 * b @ a
    np.testing.assert_allclose(layer.merged_weight().numpy(), merged, rtol=1e-5, atol=1e-6)
    expected = x.numpy() @ merged.T + dense.bias.detach().numpy()
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_it_is_what_peft_computes():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    theirs = peft.get_peft_model(
        copy.deepcopy(ours), peft.LoraConfig(r=3, lora_alpha=12, target_modules=["0", "2"], lora_dropout=0.0)
    )
    insert_adapters(ours, lab.lora(rank=3, alpha=12), stream(0, "adapters"))
    for layer in adapted(ours).values():
        nn.init.normal_(layer.lora_B.weight)
    saved = {name: t for name, t in ours.state_dict().items() if "lora_" in name}
    peft.set_peft_model_state_dict(theirs, {f"base_model.model.{name}": t for name, t in saved.items()})
    x = torch.randn(4, 6)
    torch.testing.assert_close(ours(x), theirs(x))
    merged = theirs.merge_and_unload()
    for name, layer in adapted(ours).items():
        torch.testing.assert_close(layer.merged_weight(), merged.get_submodule(name).weight)


def test_bottlenecks_begin_as_nothing_and_train():
    e = experiment(lab.bottleneck(width=3, targets=("*1",)))
    site = prepare_site(e)
    assert all(".down." in name or ".up." in name for name in site.layout.names)
    plain = prepare_site(experiment(parameters=None)).module
    x = site.dataset.inputs(site.dataset.x[:5])
    assert torch.equal(site.module(x), plain(x))
    assert not torch.equal(lab.run(e, engine="sequential").state, site.layout.flat(site.module))


# -- what travels -----------------------------------------------------------------------------------------------------


def test_only_adapters_travel_and_the_backbone_stays():
    sink = MemorySink()
    e = experiment()
    site = prepare_site(e)
    assert all("lora_" in name for name in site.layout.names)
    with lab_monitor(sink) as monitor:
        result = lab.run(e, monitor, engine="sequential")
    assert {transfer.bytes for transfer in transfers(sink)} == {4 * site.layout.size}
    for name, layer in adapted(result.model).items():
        assert torch.equal(layer.base_layer.weight, adapted(site.module)[name].base_layer.weight)
        assert layer.lora_B.weight.any()


def transfers(sink):
    return [t for t in sink.of(Transfer) if t.kind in ("model", "update")]


def lab_monitor(sink):
    return Monitor(None, sinks=[sink], strict=True)


@pytest.mark.parametrize("ranks", [{}, RANKS], ids=["one rank", "ranks"])
def test_engines_agree(ranks):
    e = experiment(lab.lora(rank=4, alpha=8, ranks=ranks))
    one = lab.run(e, engine="sequential")
    for engine, workers in (("reuse", 1), ("reuse", 2), ("stacked", 1)):
        again = lab.run(e, engine=engine, workers=workers)
        torch.testing.assert_close(again.state, one.state, rtol=1e-4, atol=1e-5)
        assert again.rounds[-1].metrics["local.loss"] == pytest.approx(one.rounds[-1].metrics["local.loss"], rel=1e-3)


@pytest.mark.parametrize("aggregation", ["zero_padded", "rank_partitioned", "exact"])
def test_any_number_of_workers_and_a_resumption_give_the_same_bits(aggregation, tmp_path):
    e = experiment(lab.lora(rank=4, alpha=8, ranks=RANKS, alphas={"c1": 2.0}, aggregation=aggregation), rounds=3)
    whole = lab.run(e, engine="reuse", workers=1)
    assert torch.equal(lab.run(e, engine="reuse", workers=3).state, whole.state)
    with lab_monitor(MemorySink()) as monitor:
        assert torch.equal(lab.run(e, monitor, engine="reuse", workers=1).state, whole.state)
    for result in lab.rounds(e, engine="reuse", workers=1, checkpoint=tmp_path):
        if len(result.rounds) == 2:
            break
    again = lab.run(e, engine="reuse", workers=1, checkpoint=tmp_path, resume=True)
    assert torch.equal(again.state, whole.state)
    assert [r.metrics for r in again.rounds] == [r.metrics for r in whole.rounds]


# -- ranks and averages -----------------------------------------------------------------------------------------------


def trained(e, state=None):
    """The site, the model before a round, each client's state and samples after its training, and the new model."""
    site = prepare_site(e)
    server = ServerState(site.layout.flat(site.module) if state is None else state)
    with Engine(site, "sequential") as engine:
        federation = Federation(site, engine, NullObserver(), server)
        tasks = [lab.Task(0, (node,), server.model) for node in e.nodes]
        updates = {u.node: (u.state.clone(), u.samples, u.start.clone()) for u in federation.train(tasks)}
        after = e.topology.round(federation)
    return site, server.model, updates, after


def some_state(e):
    site = prepare_site(e)
    state = site.layout.flat(site.module)
    return state + 0.1 * torch.randn(state.shape, generator=stream(1, "state")) * (state == 0)


def test_a_client_of_lower_rank_trains_the_first_directions_of_what_it_received():
    e = experiment(lab.lora(rank=4, alpha=8, ranks=RANKS))
    site, before, updates, _ = trained(e, some_state(e))
    for node, rank in (("c0", 2), ("c1", 4), ("c2", 1)):
        state, _, start = updates[node]
        for name, tensor in site.layout.views(state).items():
            views = (tensor, site.layout.views(start)[name], site.layout.views(before)[name])
            found, own, server = (t.T if name.endswith("lora_B.weight") else t for t in views)  # directions first
            assert torch.equal(own[:rank], server[:rank])
            assert not own[rank:].any()
            assert not found[rank:].any()
            assert not torch.equal(found[:rank], server[:rank])


def test_a_small_client_trains_as_if_its_adapters_had_no_more_directions():
    """Its gradients beyond its rank are 0 without a mask: the twin has adapters of its rank, and nothing to mask."""
    wide = experiment(lab.lora(rank=4, alpha=8, ranks={"c0": 2}), clients=1, rounds=1)
    narrow = experiment(lab.lora(rank=2, alpha=4), clients=1, rounds=1)
    state = some_state(wide)
    site, _, updates, _ = trained(wide, state)
    small = prepare_site(narrow)
    start = torch.cat([(v[:, :2] if "lora_B" in n else v[:2]).reshape(-1) for n, v in site.layout.views(state).items()])
    _, _, expected, _ = trained(narrow, start)
    kept = torch.cat(
        [(v[:, :2] if "lora_B" in n else v[:2]).reshape(-1) for n, v in site.layout.views(updates["c0"][0]).items()]
    )
    assert len(start) == small.layout.size
    torch.testing.assert_close(kept, expected["c0"][0])


def test_zero_padded_is_the_mean_with_zeros():
    e = experiment(lab.lora(rank=4, alpha=8, ranks=RANKS))
    _, _, updates, after = trained(e, some_state(e))
    states = np.stack([state.double().numpy() for state, _, _ in updates.values()])
    samples = np.array([samples for _, samples, _ in updates.values()], dtype=np.float64)
    np.testing.assert_allclose(after.numpy(), (samples[:, None] * states).sum(0) / samples.sum(), rtol=1e-6, atol=1e-7)


def test_rank_partitioned_averages_each_direction_over_those_who_have_it():
    e = experiment(lab.lora(rank=4, alpha=8, ranks={**RANKS, "c1": 3, "c3": 3}, aggregation="rank_partitioned"))
    site, before, updates, after = trained(e, some_state(e))
    ranks = {"c0": 2, "c1": 3, "c2": 1, "c3": 3}
    for name, found in site.layout.views(after).items():
        swap = name.endswith("lora_B.weight")
        for direction in range(4):
            having = [node for node in ranks if ranks[node] > direction]
            rows = {n: site.layout.views(updates[n][0])[name].double() for n in having}
            rows = {n: (v.T if swap else v)[direction] for n, v in rows.items()}
            total = sum(updates[n][1] for n in having)
            expected = sum(updates[n][1] * rows[n] for n in having) / total if having else None
            if expected is None:  # nobody has it: it stays
                expected = (site.layout.views(before)[name].T if swap else site.layout.views(before)[name])[direction]
            torch.testing.assert_close((found.T if swap else found)[direction].double(), expected.double())


def test_exact_gives_the_mean_of_the_clients_merged_weights():
    e = experiment(lab.lora(rank=4, alpha=8, ranks=RANKS, alphas={"c1": 2.0}, aggregation="exact"))
    site, _, updates, after = trained(e, some_state(e))
    module, total = copy.deepcopy(site.module), sum(samples for _, samples, _ in updates.values())
    expected = dict.fromkeys(adapted(module), 0.0)
    scales = {"c0": 2.0, "c1": 0.5, "c2": 2.0, "c3": 2.0}
    for node, (state, samples, _) in updates.items():
        site.layout.load(module, state)
        set_scale(module, scales[node])
        for name, layer in adapted(module).items():
            expected[name] = expected[name] + samples / total * layer.merged_weight().double()
    site.layout.load(module, after)
    set_scale(module, 2.0)
    for name, layer in adapted(module).items():
        torch.testing.assert_close(layer.merged_weight().double(), expected[name], rtol=1e-6, atol=1e-6)
        assert layer.residual.abs().max() > 1e-4  # averaging A and B alone is not that


def test_bytes_are_those_of_what_a_client_holds_and_residuals_are_not_sent_back():
    e = experiment(lab.lora(rank=4, alpha=8, ranks=RANKS, aggregation="exact"), rounds=1)
    site, sink = prepare_site(e), MemorySink()
    with lab_monitor(sink) as monitor:
        lab.run(e, monitor, engine="sequential")
    sent = {(t.sender, t.receiver): t.bytes for t in transfers(sink)}
    layers = [(v.base_layer.in_features, v.base_layer.out_features) for v in adapted(site.module).values()]
    weights, factors = sum(i * o for i, o in layers), sum(i + o for i, o in layers)
    for node, rank in (("c0", 2), ("c1", 4), ("c2", 1)):
        assert sent[node, "server"] == 4 * rank * factors
        assert sent["server", node] == 4 * (rank * factors + weights)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="need one rank"):
        experiment(lab.lora(ranks={"c0": 2}), topology=lab.Rings())
    with pytest.raises(ConfigError, match="rule of its own"):
        experiment(lab.lora(aggregation="exact"), aggregator="median")
    with pytest.raises(ConfigError, match="rule of its own"):
        experiment(lab.lora(aggregation="rank_partitioned"), aggregator=lab.fedavg(0.5))
    with pytest.raises(ConfigError, match="shift all gradients"):
        experiment(lab.lora(ranks={"c0": 2}), aggregator="scaffold")
    for adapters in (lab.lora(ranks={"c0": 2}), lab.lora(aggregation="exact")):
        with pytest.raises(ConfigError, match="no single client's adapters"):
            experiment(adapters, secure_aggregation=lab.SecureAggregation())
    with pytest.raises(ConfigError, match="c0 to c3"):
        experiment(lab.lora(ranks={"c9": 2}))
    with pytest.raises(ConfigError, match="at least 1"):
        lab.lora(rank=0)
    with pytest.raises(ConfigError, match="No dense layer is called 'conv"):
        lab.run(experiment(lab.lora(targets=("conv*",))))
    with pytest.raises(ConfigError, match="leave `frozen` out"):
        lab.Parameters(frozen=("*",), adapters=lab.lora())
    with pytest.raises(ConfigError, match="has an adapter"):
        lab.run(experiment(parameters=lab.Parameters(trained=("*",), adapters=lab.lora())))
    with pytest.raises(ConfigError, match="kind of adapters"):
        lab.read('[parameters]\nadapters = "loar"')


@pytest.mark.parametrize(
    ("adapters", "reason"),
    [(lab.lora(aggregation="exact"), "residuals"), (lab.lora(alphas={"c0": 3.0}), "α/r for each client")],
)
def test_what_cannot_be_stacked_says_why(adapters, reason):
    with pytest.raises(ConfigError, match=f"cannot be stacked.*{reason}"):
        lab.run(experiment(adapters), engine="stacked")
