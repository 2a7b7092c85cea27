# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters at the server: recognised by structure, and every sign equal to that of the full products."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from fedvitals import lab
from fedvitals.lab.adapters import BottleneckLinear
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.adapters import grams as adapter_grams
from fedvitals.probes.adapters.grams import FactorPair, PairLayout, grams_of, stacked_clients, step_products
from fedvitals.probes.adapters.pairs import AdapterPair, find_pairs, scale_of
from fedvitals.probes.adapters.signs import mean_weights, signs_of
from fedvitals.stats import ADAPTER_COLUMNS
from fedvitals.testing import MemorySink
from support.adapter_runs import federate, lora_model, only_trains


class OwnLora(nn.Module):
    """A low-rank adapter as somebody writes it by hand; its names tell nothing."""

    def __init__(self, layer, rank, alpha):
        super().__init__()
        self.layer, self.alpha = layer, alpha
        self.first = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features))
        self.second = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + self.alpha / len(self.first) * (x @ self.first.T) @ self.second.T


def shapes_of(model, *, trained):
    return [(n, tuple(p.shape)) for n, p in model.named_parameters() if p.requires_grad is trained]


def pairs_of(model):
    return find_pairs(shapes_of(model, trained=True), shapes_of(model, trained=False))


# -- recognised -------------------------------------------------------------------------------------------------------


def test_pairs_of_peft_are_known_with_their_scale():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 9), nn.Conv2d(3, 8, 3), nn.Embedding(40, 16))
    targets = {"r": 2, "lora_alpha": 8, "target_modules": ["0", "2", "3", "4"], "rank_pattern": {"2": 4}}
    model = peft.get_peft_model(base, peft.LoraConfig(**targets))
    pairs = pairs_of(model)
    assert [(p.name.rpartition(".")[2], p.rank, p.inputs, p.outputs) for p in pairs] == [
        ("0", 2, 12, 10), ("2", 4, 10, 9), ("3", 2, 27, 8), ("4", 2, 40, 16),
    ]  # fmt: skip
    assert [scale_of(model, pair) for pair in pairs] == [4.0, 2.0, 4.0, 4.0]


def test_prompts_and_vectors_of_peft_train_and_travel_but_are_no_pairs():
    pytest.importorskip("peft", reason="peft is not installed")
    names = ["prompt_encoder.default.embedding.weight", "h.0.ia3_l.default", "score.weight"]
    assert find_pairs([(names[0], (20, 64)), (names[1], (64, 1)), (names[2], (2, 64))]) == ()


def test_a_pair_is_known_by_its_shapes_beside_the_frozen_matrix():
    model = nn.Sequential(OwnLora(nn.Linear(20, 30), 4, 8), nn.ReLU(), OwnLora(nn.Linear(30, 16), 2, 8))
    only_trains(model, "first", "second")
    pairs = pairs_of(model)
    assert [(p.name, p.a, p.b, p.rank) for p in pairs] == [
        ("0", "0.first", "0.second", 4), ("2", "2.first", "2.second", 2),
    ]  # fmt: skip
    assert [scale_of(model, pair) for pair in pairs] == [2.0, 4.0]


def test_a_branch_beside_the_only_frozen_matrix_around_it_is_a_pair():
    branches = [nn.Sequential(nn.Linear(20, 4, bias=False), nn.Linear(4, 30, bias=False)) for _ in range(2)]
    wrapped = nn.ModuleDict({"linear": nn.Linear(20, 30), "branch": branches[0]})
    block = nn.ModuleDict({"q": nn.Linear(20, 30), "k": nn.Linear(20, 30), "own": branches[1]})
    pairs = pairs_of(only_trains(nn.ModuleList([wrapped, block]), "branch.0.weight", "branch.1.weight", "own.0.weight"))
    assert [(p.name, p.a, p.b, p.rank) for p in pairs] == [("0.branch", "0.branch.0.weight", "0.branch.1.weight", 4)]


def test_names_that_say_lora_tell_several_pairs_of_one_module_apart():
    shapes = [(f"att.{own}", (4, 9) if own.endswith("a") else (9, 4)) for own in ("q_lora_a", "v_lora_a", "q_lora_b")]
    shapes += [("att.v_lora_b", (9, 4)), ("att.lora_down_k.weight", (2, 9)), ("att.lora_up_k.weight", (9, 2))]
    shapes += [("att.q_a_proj", (4, 9)), ("att.q_b_proj", (9, 4))]  # of the model itself
    assert [(pair.name, pair.b) for pair in find_pairs(shapes)] == [
        ("att.q", "att.q_lora_b"), ("att.v", "att.v_lora_b"), ("att.k", "att.lora_up_k.weight"),
    ]  # fmt: skip


class TransposedLora(nn.Module):
    """The adapter of many tutorials: alpha * (x @ A @ B), beside its layer and not around it."""

    def __init__(self, inputs, outputs, rank, alpha):
        super().__init__()
        self.A = nn.Parameter(torch.randn(inputs, rank) / math.sqrt(rank))
        self.B = nn.Parameter(torch.zeros(rank, outputs))
        self.alpha = alpha


@pytest.mark.parametrize("outputs", [30, 20])
def test_a_pair_is_known_when_it_is_written_transposed(outputs):
    layer = nn.Linear(20, outputs).requires_grad_(False)
    model = nn.ModuleDict({"linear": layer, "lora": TransposedLora(20, outputs, 4, 8)})
    (pair,) = pairs_of(model)
    assert (pair.name, pair.a, pair.b, pair.rank) == ("lora", "lora.B", "lora.A", 4)
    assert (pair.inputs, pair.outputs, scale_of(model, pair)) == (outputs, 20, 2.0)


def test_a_pair_is_known_by_its_names_where_only_one_side_trains():
    model = lora_model()
    both = pairs_of(model)
    for ends in (["lora_B.weight"], ["lora_A.weight"], ["0.lora_A.weight", "2.lora_B.weight"]):
        assert pairs_of(only_trains(model, *ends)) == both
    assert pairs_of(only_trains(model, "bias")) == ()  # an adapter that rests, beside what trains


def test_what_only_looks_like_a_pair_is_none():
    two_layers = nn.Sequential(nn.Linear(20, 3), nn.Linear(3, 20))
    assert pairs_of(two_layers) == ()  # a bottleneck of the model's own: nothing is frozen beside it
    bottleneck = nn.Sequential(BottleneckLinear(nn.Linear(20, 20), 3))
    assert pairs_of(only_trains(bottleneck, "down.weight", "down.bias", "up.weight", "up.bias")) == ()
    assert find_pairs([("x.A", (16, 16)), ("x.B", (16, 16))]) == ()  # of full rank
    assert find_pairs([("x.lora_A.d", (2, 9)), ("x.lora_B.d", (9, 2)), ("x.lora_E.d", (2, 1))]) == ()  # three factors


# -- exact ------------------------------------------------------------------------------------------------------------


@dataclass
class Factors:
    b: np.ndarray
    a: np.ndarray
    scale: float = 1.0

    @property
    def product(self):
        return self.scale * self.b @ self.a


def factors(generator, rank, scale=2.0, padded=None):
    b, a = generator.normal(size=(30, rank)), generator.normal(size=(rank, 20))
    if padded:
        b, a = np.pad(b, ((0, 0), (0, padded - rank))), np.pad(a, ((0, padded - rank), (0, 0)))
    return Factors(b, a, scale)


def as_kept(own):
    return FactorPair(*(adapter_grams.local(torch.from_numpy(side)) for side in (own.a, own.b)))


def stacks_of(start, sent):
    """The clients' updates as a monitor keeps them: what they sent, less the directions that they were sent."""
    layouts = {}
    for own in sent:
        rank, sizes = len(own.a), (own.a.size, own.a.size + own.b.size)
        pair = AdapterPair("x", "x.A", "x.B", rank, own.a.shape[1], len(own.b))
        layouts.setdefault(rank, PairLayout((pair,), {"x.A": (0, sizes[0]), "x.B": sizes}))
    steps = [(own.a - start.a[: len(own.a)], own.b - start.b[:, : len(own.a)]) for own in sent]
    vectors = [torch.from_numpy(np.concatenate([a.ravel(), b.ravel()])) for a, b in steps]
    return stacked_clients([(v, layouts[len(own.a)]) for v, own in zip(vectors, sent, strict=True)])


def measured_signs(start, sent, weights, new, first=None):
    """The signs of one adapter, and the directions that its clients were seen to have."""
    whole = [[as_kept(own)] for own in (start, new)]
    beginning = [None if first is None else as_kept(first)]
    (grams,) = grams_of(["x"], *whole, stacks_of(start, sent), beginning)
    scales = [start.scale, new.scale, *(own.scale for own in sent), *(() if first is None else (first.scale,))]
    return signs_of([grams], np.array([scales]), weights, first=None if first is None else -1), grams.held


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("padded", [True, False])
def test_every_sign_is_that_of_the_full_products(padded, where, monkeypatch):
    if where == "device":  # tensors stay tensors
        monkeypatch.setattr(adapter_grams, "local", lambda values: values)
    generator, ranks = np.random.default_rng(0), (2, 4, 4, 6)
    start, weights = factors(generator, 6), np.array([0.1, 0.2, 0.3, 0.4])
    first = factors(generator, 6)
    sent = [factors(generator, r, scale=1 + r, padded=6 if padded else None) for r in ranks]
    new = factors(generator, 6)
    signs, held = measured_signs(start, sent, weights, new, first)
    assert held == ranks
    p, before = new.product, start.product
    mean = sum(w * own.product for w, own in zip(weights, sent, strict=True))
    intended = np.zeros_like(p)
    above = np.zeros_like(p)
    for k in range(6):
        total = sum(w for w, r in zip(weights, ranks, strict=True) if r > k)
        for w, r, own in zip(weights, ranks, sent, strict=True):
            if r > k:
                step = w / total * own.scale * np.outer(own.b[:, k], own.a[k])
                intended += step
                above += step if k >= 2 else 0
    norm = np.linalg.norm
    sigma = np.linalg.svd(p, compute_uv=False)
    shares = sigma**2 / (sigma**2).sum()
    kept = new.scale * new.b[:, 2:] @ new.a[2:]
    expected = {
        "norm": norm(p),
        "change": norm(p - before),
        "drift": norm(p - first.product),
        "effective_rank": np.exp(-(shares[:6] * np.log(shares[:6])).sum()),
        "stable_rank": 1 / shares[0],
        "energy_above": (norm(kept) / norm(p)) ** 2,
        "energy_kept": (norm(kept) / norm(above)) ** 2,
        "error": norm(p - mean) / norm(mean),
        "error_by_rank": norm(p - intended) / norm(intended),
    }
    for name, value in expected.items():
        assert getattr(signs, name)[0] == pytest.approx(value, rel=1e-9), name
    np.testing.assert_allclose(signs.spectrum[0, :6], shares[:6], rtol=1e-9)
    u, _, vt = np.linalg.svd(p)
    for place, (own, weight) in enumerate(zip(sent, weights, strict=True)):
        assert signs.client_norms[0, place] == pytest.approx(norm(own.product))
        assert signs.client_changes[0, place] == pytest.approx(norm(own.product - before))
        wanted = [weight * u[:, k] @ own.product @ vt[k] / sigma[k] for k in range(6)]
        np.testing.assert_allclose(signs.client_directions[0, place, :6], wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("ranks", [(2, 4), (4, 4)])
def test_directions_that_no_client_of_a_round_has_are_intended_to_stay(ranks):
    generator = np.random.default_rng(7)
    start, sent = factors(generator, 6), [factors(generator, r) for r in ranks]
    new = factors(generator, 6)
    signs, held = measured_signs(start, sent, np.array([0.5, 0.5]), new)
    assert held == ranks
    intended, smallest = np.zeros((30, 20)), min(ranks)
    above = intended.copy()
    for k in range(6):
        own = [one for one, rank in zip(sent, ranks, strict=True) if rank > k] or [start]
        step = sum(one.scale * np.outer(one.b[:, k], one.a[k]) for one in own) / len(own)
        intended, above = intended + step, above + step * (k >= smallest)
    norm = np.linalg.norm
    kept = new.scale * new.b[:, smallest:] @ new.a[smallest:]
    assert signs.error_by_rank[0] == pytest.approx(norm(new.product - intended) / norm(intended), rel=1e-9)
    assert signs.energy_kept[0] == pytest.approx((norm(kept) / norm(above)) ** 2, rel=1e-9)
    unused = Factors(start.b * (np.arange(6) < 4), start.a, 2.0)  # the directions of no client are zero already
    by_rank = measured_signs(unused, sent, np.array([0.5, 0.5]), new)[0].error_by_rank[0]
    assert np.isnan(by_rank) == (ranks == (4, 4))


def test_adapters_of_equal_ranks_are_computed_together_as_they_are_alone():
    generator = np.random.default_rng(4)
    start, new = factors(generator, 4), factors(generator, 4)
    sent = [factors(generator, 4) for _ in range(3)]
    (grams,) = grams_of(["x"], [as_kept(start)], [as_kept(new)], stacks_of(start, sent), [None])
    (other,) = grams_of(["x"], [as_kept(new)], [as_kept(start)], stacks_of(new, sent), [None])
    scales, weights = np.array([[2.0] * 5, [3.0] * 5]), np.full(3, 1 / 3)
    together = signs_of([grams, other], scales, weights, first=0)
    for place, own in enumerate((grams, other)):
        alone = signs_of([own], scales[place : place + 1], weights, first=0)
        for name in ("norm", "drift", "error", "effective_rank", "spectrum", "client_directions"):
            np.testing.assert_allclose(getattr(together, name)[place], getattr(alone, name)[0], rtol=1e-9)


def test_a_product_of_zero_has_no_directions_and_no_rank():
    generator = np.random.default_rng(5)
    start, sent = factors(generator, 3), [factors(generator, 3) for _ in range(2)]
    zero = Factors(np.zeros((30, 3)), start.a)
    signs, _ = measured_signs(start, sent, np.array([0.5, 0.5]), zero)
    assert (signs.norm[0], signs.effective_rank[0], signs.stable_rank[0]) == (0, 0, 0)
    assert np.isnan(signs.client_directions).all()


def test_a_model_of_nan_has_no_signs_and_takes_none_from_the_others():
    generator = np.random.default_rng(5)
    start, new, sent = factors(generator, 4), factors(generator, 4), [factors(generator, 4) for _ in range(3)]
    lost = Factors(np.full((30, 4), np.nan), new.a)
    whole, broken = (
        grams_of(["x"], [as_kept(start)], [as_kept(own)], stacks_of(start, sent), [None])[0] for own in (new, lost)
    )
    weights = np.full(3, 1 / 3)
    alone = signs_of([whole], np.full((1, 5), 2.0), weights, first=None)
    both = signs_of([whole, broken], np.full((2, 5), 2.0), weights, first=None)
    assert both.effective_rank[0] == pytest.approx(alone.effective_rank[0])
    assert np.isnan([both.norm[1], both.effective_rank[1], both.stable_rank[1]]).all()


def test_a_small_error_does_not_drown_in_rounding():
    generator = np.random.default_rng(1)
    start = factors(generator, 4)
    sent = [Factors(start.b + 1e-5 * generator.normal(size=start.b.shape), start.a, 2.0) for _ in range(3)]
    mean = Factors(sum(own.b for own in sent) / 3, start.a, 2.0)
    signs, _ = measured_signs(start, sent, np.full(3, 1 / 3), mean)
    assert signs.error[0] < 1e-6
    moved = Factors(mean.b * (1 + 1e-4), mean.a, 2.0)
    signs, _ = measured_signs(start, sent, np.full(3, 1 / 3), moved)
    assert signs.error[0] == pytest.approx(1e-4, rel=1e-3)


def test_the_weights_of_a_mean_are_solved_and_of_something_else_are_unknown():
    generator = np.random.default_rng(2)
    start, sent = factors(generator, 4), [factors(generator, 4) for _ in range(3)]
    weights = np.array([0.5, 0.2, 0.3])

    def solved(combine):
        new = Factors(combine([own.b for own in sent]), combine([own.a for own in sent]))
        sides = [as_kept(start)], [as_kept(new)]
        return mean_weights(*step_products(["x"], *sides, stacks_of(start, sent), [4]))

    def mean(parts):
        return sum(w * part for w, part in zip(weights, parts, strict=True))

    np.testing.assert_allclose(solved(mean), weights, atol=1e-9)
    assert solved(lambda parts: np.median(parts, axis=0)) is None
    assert solved(lambda parts: 0.5 * mean(parts)) is None
    sides = [as_kept(start)], [as_kept(start)]
    assert mean_weights(*step_products(["x"], *sides, stacks_of(start, sent), [4])) is None  # nothing happened


def test_directions_that_are_zero_or_as_they_were_sent_are_not_a_clients():
    generator = np.random.default_rng(3)
    start, small = factors(generator, 6), factors(generator, 2)
    padded = Factors(np.pad(small.b, ((0, 0), (0, 4))), np.pad(small.a, ((0, 4), (0, 0))))
    kept = Factors(np.hstack([small.b, start.b[:, 2:]]), np.vstack([small.a, start.a[2:]]))
    for own, rank in ((padded, 2), (kept, 2), (small, 2), (start, 6)):
        assert measured_signs(start, [own], None, start)[1] == (rank,)


# -- in a run ---------------------------------------------------------------------------------------------------------


def watched(tmp_path, model, **settings):
    sink = MemorySink()
    monitor = Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True)
    states = federate(monitor, model, **settings)
    monitor.close()
    return sink, states


def metrics_of(sink, node, round_index):
    wanted = {r.name: r.value for r in sink.metrics() if (r.where.node, r.where.round) == (node, round_index)}
    return {name: value for name, value in wanted.items() if "adapter" in name}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_loop_tells_of_its_adapters_what_full_products_do(tmp_path, device):
    model = lora_model().to(device)
    sink, states = watched(tmp_path, model)
    errors = []
    for layer in ("0", "2"):
        names = f"{layer}.lora_B.weight", f"{layer}.lora_A.weight"
        products = [2.0 * state[names[0]].double() @ state[names[1]].double() for state in states]
        mean = torch.stack(products).mean(0)
        own = {name: p.detach() for name, p in model.named_parameters()}
        aggregated = 2.0 * own[names[0]].double() @ own[names[1]].double()
        errors.append(float((aggregated - mean).norm() / mean.norm()))
    measured = metrics_of(sink, "server", 1)
    assert measured["adapter.product_error"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert measured["adapter.scale"] == 2.0
    assert measured["adapter.unmoved"] == 0
    assert "adapter.energy_above" not in measured  # all clients have one rank
    client = metrics_of(sink, "c1", 1)
    assert (client["adapter.scale"], client["adapter.rank"], client["update.adapter_rank"]) == (2.0, 4.0, 4.0)
    rows = sink.layers("update.adapters", node="server", round=1).matrix
    assert rows.shape == (2, len(ADAPTER_COLUMNS))
    np.testing.assert_allclose(rows[:, ADAPTER_COLUMNS.index("error")], errors, rtol=1e-5)
    parts = np.array([sink.layers("update.directions", node=f"c{c}", round=1).matrix[:, 0] for c in range(3)])
    assert parts.sum(0) == pytest.approx([1, 1], abs=0.3)  # 1, but for the error of the aggregation


def test_ranks_that_differ_lose_the_upper_directions_when_padded_with_zeros(tmp_path):
    sink, _ = watched(tmp_path, lora_model(), ranks=(2, 2, 2, 4))
    measured = metrics_of(sink, "server", 1)
    assert measured["adapter.energy_kept"] < 0.01  # a quarter has them: (1/4)² in B A, squared
    assert metrics_of(sink, "c0", 1)["update.adapter_rank"] == 2
    assert metrics_of(sink, "c3", 1)["update.adapter_rank"] == 4


def test_a_residual_in_the_frozen_weights_is_a_part_of_the_aggregation(tmp_path):
    def add_residual(model, states):
        del states
        model[0].base_layer.weight.add_(0.01)

    sink, _ = watched(tmp_path, lora_model(), aggregate=add_residual)
    measured = metrics_of(sink, "server", 1)
    assert "adapter.product_error" not in measured
    assert measured["adapter.effective_rank"] > 0


def test_frozen_weights_that_are_averaged_as_well_are_no_residual(tmp_path):
    changed = []

    def average_all(model, states):
        for layer in ("0", "2"):
            weight = model[int(layer)].base_layer.weight
            mean = 0.1 * weight + 0.2 * weight + 0.7 * weight  # of equal numbers, but for their rounding
            changed.append(not torch.equal(weight, mean))
            weight.copy_(mean)

    sink, _ = watched(tmp_path, lora_model(), aggregate=average_all)
    assert all(changed[:2])  # in round 0; a mean of means may change nothing more
    assert metrics_of(sink, "server", 0)["adapter.product_error"] > 0


@pytest.mark.parametrize(("ends", "exact"), [(["lora_B.weight"], True), (["lora_A.weight", "2.lora_B.weight"], False)])
def test_a_pair_of_which_one_side_is_frozen_is_measured(tmp_path, ends, exact):
    model = lora_model()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.lora_B.weight.normal_(std=0.1)  # of zeros, an A alone would change no product
    start = [(layer.lora_B.weight @ layer.lora_A.weight).detach() for layer in (model[0], model[2])]
    sink, states = watched(tmp_path, only_trains(model, *ends))
    products = [(layer.lora_B.weight @ layer.lora_A.weight).detach() for layer in (model[0], model[2])]
    drift = 2.0 * float(torch.cat([(p - s).flatten() for p, s in zip(products, start, strict=True)]).norm())
    measured = metrics_of(sink, "server", 1)
    assert measured["adapter.drift"] == pytest.approx(drift, rel=1e-5)
    assert measured["adapter.unmoved"] == 0
    assert (measured["adapter.product_error"] < 1e-6) == exact  # linear in what trains, where the other side is fixed
    client = 2.0 * states[1]["0.lora_B.weight"] @ states[1]["0.lora_A.weight"]
    norms = sink.layers("update.adapters", node="c1", round=1).matrix[:, ADAPTER_COLUMNS.index("norm")]
    assert norms[0] == pytest.approx(float(client.norm()), rel=1e-5)
    assert metrics_of(sink, "c1", 1)["adapter.rank"] == 4


def test_the_lab_measures_its_adapters_and_exact_aggregation_has_no_error(tmp_path):
    names = {}
    for aggregation in ("zero_padded", "exact"):
        sink = MemorySink()
        monitor = Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True)
        adapters = lab.lora(rank=4, alpha=8, aggregation=aggregation)
        local = lab.Local(iterations=3, optimizer=lab.sgd(0.5))
        lab.run(
            lab.Experiment(
                dataset=lab.synthetic(samples=200),
                model=lab.mlp(hidden=(12,)),
                clients=4,
                seed=3,
                rounds=2,
                local=local,
                parameters=lab.Parameters(adapters=adapters),
            ),
            monitor,
        )
        monitor.close()
        names[aggregation] = sink.names()
    assert "adapter.product_error" in names["zero_padded"]
    assert "adapter.product_error" not in names["exact"]
    assert "adapter.effective_rank" in names["exact"]


def test_scales_that_differ_between_clients_are_named(tmp_path):
    monitor = Monitor(str(tmp_path / "runs.db"), strict=True)
    federate(monitor, lora_model(), rounds=1, scales=(2.0, 2.0, 8.0))
    monitor.flush()
    named = [finding.where.node for finding in monitor.findings() if finding.issue == "ADAPTER_SCALE_MISMATCH"]
    monitor.close()
    assert named == ["c2"]
