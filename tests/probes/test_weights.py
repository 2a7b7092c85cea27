# SPDX-License-Identifier: Apache-2.0
"""Weights and how far they move, against copies that the test keeps in float64."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedvitals.probes.weights import check_initialisation, fades_everywhere, starts_at_zero
from fedvitals.stats import COUNT, SUM
from support.models import MODELS, batches, close, flat, make, make_data, train, twin_sums, watched

every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_nine_statistics_after_training(name):
    """The client's record is of its weights as they stand when its scope closes, layer by layer."""
    model = make(name)
    monitor, sink = watched()
    with monitor, monitor.round(0), monitor.client("c0", model):
        train(model, torch.optim.Adam(model.parameters(), 1e-2), make_data(), 4)
    close(sink.layers("weight", node="c0").matrix, [twin_sums(p) for p in model.parameters()])
    close(sink.value("weight.norm", node="c0"), float(flat(model).norm()))
    assert sink.value("weight.nonfinite", node="c0") == 0


def test_buffers_are_counted_apart():
    """Batch norm's running statistics and its integer counter are buffers, with a table of their own."""
    model = make("cnn")
    monitor, sink = watched()
    with monitor, monitor.round(0), monitor.client("c0", model):
        train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 4)
    found = sink.layers("buffer", node="c0")
    names = ("2.running_mean", "2.running_var", "2.num_batches_tracked")
    assert sink.table(found.table).names == names
    assert len(sink.layers("weight", node="c0").matrix) == len(list(model.parameters()))
    close(found.matrix, [twin_sums(b) for b in model.buffers()])
    assert (found.matrix[2, COUNT], found.matrix[2, SUM]) == (1, 4)


@pytest.mark.parametrize("probes", ["light", "standard", "deep"])
@every_model
def test_global_model_each_round(name, probes):
    """At every level the round's end has the statistics of the global model, under «server»."""
    model = make(name)
    monitor, sink = watched(probes)
    with monitor, monitor.round(0, model), torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    close(sink.layers("weight", node="server").matrix, [twin_sums(p) for p in model.parameters()])
    close(sink.value("weight.norm", node="server"), float(flat(model).norm()))


@every_model
def test_movement(name):
    """Drift from the round's start and from the first model, difference (signed and absolute), and ratio."""
    shared = make(name)
    initial = flat(shared)
    monitor, sink = watched()
    with monitor:
        for number in range(2):
            with monitor.round(number, shared):
                local = copy.deepcopy(shared)
                start = flat(local)
                with monitor.client("c0", local):
                    train(local, torch.optim.SGD(local.parameters(), 0.5), make_data(), 5)
                change = flat(local) - start
                place = {"node": "c0", "round": number, "step": None}
                wanted = {
                    "weight.drift": change.norm(),
                    "weight.difference": change.sum(),
                    "weight.difference_absolute": change.abs().sum(),
                    "weight.update_ratio": change.norm() / start.norm(),
                    "weight.drift_init": (flat(local) - initial).norm(),
                }
                monitor.flush()
                for metric, value in wanted.items():
                    close(sink.value(metric, **place), float(value), 1e-4)
                shared.load_state_dict(local.state_dict())


@every_model
def test_difference_of_each_iteration(name):
    """In `deep` each iteration has its own difference; the signed ones add up to the client-round's."""
    model = make(name)
    monitor, sink = watched("deep")
    copies = []
    with monitor, monitor.round(0), monitor.client("c0", model):
        train(model, torch.optim.Adam(model.parameters(), 1e-2), make_data(), 5, lambda _: copies.append(flat(model)))
    copies.append(flat(model))
    changes = [after - before for before, after in itertools.pairwise(copies)]
    for step, change in enumerate(changes):
        close(sink.value("weight.difference", node="c0", step=step), float(change.sum()), 1e-4)
        close(sink.value("weight.difference_absolute", node="c0", step=step), float(change.abs().sum()), 1e-4)
    total = sum(m.value for m in sink.metrics("weight.difference", node="c0") if m.where.step is not None)
    close(total, sink.value("weight.difference", node="c0", step=None), 1e-4)


def test_difference_of_an_edge_is_that_of_its_clients():
    """An edge without a model of its own has the sum over its clients; one with a model has the model's."""
    monitor, sink = watched()
    changes = {}
    edge_model = make("mlp")
    with monitor, monitor.round(0):
        for edge in ("edge-0", "edge-1"):
            with monitor.edge(edge, edge_model if edge == "edge-1" else None):
                for client in range(2):
                    model = make("mlp")
                    with monitor.client(f"{edge}-c{client}", model):
                        train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(seed=client), 2)
                    changes[edge, client] = flat(model) - flat(make("mlp"))
                with torch.no_grad():
                    edge_model[0].bias += 2
    signed = sum(float(changes["edge-0", c].sum()) for c in range(2))
    absolute = sum(float(changes["edge-0", c].abs().sum()) for c in range(2))
    close(sink.value("weight.difference", node="edge-0"), signed, 1e-4)
    close(sink.value("weight.difference_absolute", node="edge-0"), absolute, 1e-4)
    close(sink.value("weight.difference", node="edge-1"), 20.0, 1e-4)
    close(sink.value("weight.difference_absolute", node="edge-1"), 20.0, 1e-4)
    merged = sink.layers("update", node="edge-0").matrix
    close(merged[:, SUM].sum(), signed, 1e-4)


def test_group_given_to_the_client():
    """A cluster or ring is named on the client itself where no edge is open around it."""
    monitor, sink = watched()
    with monitor, monitor.round(0):
        for client in range(2):
            model = make("mlp")
            with monitor.client(f"c{client}", model, group="ring-1"):
                train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 2)
    assert sink.value("steps", node="c0", group="ring-1") == 2
    assert sink.metrics("weight.difference", node="ring-1", group="ring-1")


def test_difference_with_several_optimisers_telescopes():
    """Two optimisers of one model: still one difference a step, which add up to the whole."""
    model = make("mlp")
    optimizers = [torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2)]
    monitor, sink = watched("deep")
    with monitor, monitor.round(0), monitor.client("c0", model):
        for x, y in batches(make_data(), 4):
            model.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    found = sink.metrics("weight.difference", node="c0")
    steps = [m for m in found if m.where.step is not None]
    assert [m.where.step for m in steps] == [0, 1, 2, 3]
    close(sum(m.value for m in steps), sink.value("weight.difference", node="c0", step=None), 1e-4)


def test_model_that_changes_its_type_inside_the_scope():
    """`model.double()` in the midst of a scope keeps its parameters: movement is still measured."""
    model = make("mlp")
    start = flat(model)
    monitor, sink = watched()
    with monitor, monitor.round(0), monitor.client("c0", model):
        model.double()
        x, y = make_data()
        train(model, torch.optim.SGD(model.parameters(), 0.1), (x.double(), y), 2)
    close(sink.value("weight.drift", node="c0"), float((flat(model) - start).norm()), 1e-4)


def test_model_of_one_parameter():
    """The weights of the start are a copy, also where there is nothing to join."""
    model = nn.Linear(12, 3, bias=False)
    start = flat(model)
    monitor, sink = watched()
    with monitor, monitor.round(0), monitor.client("c0", model):
        train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 2)
    close(sink.value("weight.drift", node="c0"), float((flat(model) - start).norm()), 1e-4)


@pytest.mark.parametrize("seed", range(5))
@every_model
def test_usual_initialisation_is_fine(name, seed):
    """The default initialisations of torch give no remark."""
    assert check_initialisation(make(name, seed)) == []


def test_gpt_2_is_initialised_well():
    """Its branches end in matrices that start small on purpose, and layer norms restore the scale."""
    transformers = pytest.importorskip("transformers", reason="the model is one of transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=64)
    assert check_initialisation(transformers.GPT2LMHeadModel(config)) == []


@pytest.mark.parametrize("cell", [nn.GRU(1, 64), nn.LSTM(2, 256, num_layers=2), nn.RNN(1, 128), nn.GRUCell(1, 64)])
def test_recurrent_cells_with_few_inputs_are_initialised_well_by_torch(cell):
    assert check_initialisation(nn.Sequential(cell)) == []


def uniform(model):
    nn.init.uniform_(model[1].weight, 8, 10)


def zeros(model):
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[6].weight)


def equal(model):
    nn.init.constant_(model[6].weight, 0.5)


def not_a_number(model):
    model[1].weight.data[0, 0, 0, 0] = np.nan


def tiny(model):
    model[6].weight.data *= 1e-4


@pytest.mark.parametrize(
    ("spoil", "layers", "words"),
    [
        (uniform, ["1.weight"], "grow"),
        (zeros, ["1.weight", "6.weight"], "all values equal 0"),
        (equal, ["6.weight"], "all values equal 0.5"),
        (not_a_number, ["1.weight"], "1 values are NaN or Inf"),
        (tiny, ["6.weight"], "fade"),
    ],
)
def test_bad_initialisation_is_remarked(spoil, layers, words):
    """Far too large, all equal, NaN, far too small: each is told before any training, once a run, as an Event."""
    model = make("cnn")
    spoil(model)
    remarks = check_initialisation(model)
    assert [name for name, _ in remarks] == layers
    assert words in remarks[0][1]
    monitor, sink = watched()
    with monitor:
        for number in range(2):
            with monitor.round(number, model):
                pass
    events = sink.events("initialisation")
    assert [(e.level, e.data["layer"], e.where.round) for e in events] == [("warning", name, 0) for name in layers]


def scaled(model, factor):
    for parameter in model.parameters():
        parameter.data *= factor
    return model


def drawn(std):
    model = make("cnn")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, std)
    return model


def adapted(std):
    """A frozen layer between two matrices that begin near 0, as the adapters of Houlsby et al. do."""
    model = nn.Sequential(nn.Linear(12, 4), nn.Linear(12, 10).requires_grad_(requires_grad=False), nn.Linear(4, 12))
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, 0, std)
    return model


@every_model
def test_weights_that_are_all_far_too_small_are_a_mistake_of_scale(name):
    assert fades_everywhere(scaled(make(name), 0.01))
    monitor, sink = watched()
    with monitor, monitor.round(0, scaled(make(name), 0.01)):
        pass
    assert {event.data.get("everywhere") for event in sink.events("initialisation")} == {True}


@pytest.mark.parametrize(
    "start",
    [
        *(lambda name=name: make(name) for name in MODELS),
        *(lambda std=std: drawn(std) for std in (0.05, 0.02, 0.01)),
        lambda: adapted(1e-3),
        lambda: scaled(nn.Linear(12, 3), 1e-3),
    ],
)
def test_a_start_that_some_scheme_intends_is_no_mistake_of_scale(start):
    assert not fades_everywhere(start())


def test_one_matrix_that_is_too_small_is_no_mistake_of_scale():
    model = make("cnn")
    tiny(model)
    assert check_initialisation(model)
    assert not fades_everywhere(model)
    monitor, sink = watched()
    with monitor, monitor.round(0, model):
        pass
    assert [event.data for event in sink.events("initialisation")] == [{"layer": "6.weight"}]


class Adapter(nn.Module):
    """A frozen layer with a low-rank correction that begins at 0."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(12, 10).requires_grad_(requires_grad=False)
        self.base.weight.data *= 100  # frozen: how it was made is nobody's business here
        self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 10, bias=False)
        nn.init.zeros_(self.up.weight)


class Vision(nn.Module):
    """Arrays whose shape tells no fan-in: a position embedding and a stack of experts, as vision transformers have."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(1, 197, 384))
        self.experts = nn.Parameter(torch.randn(4, 64, 64) / 8)
        self.head = nn.Linear(384, 3)


def test_zero_starts_and_frozen_weights_are_no_bad_start():
    """An adapter, a head of zeros, and a model of which only its arrays are known: told as an info, with no remark."""
    head = make("mlp")
    nn.init.zeros_(head[2].weight)
    arrays = make("mlp").requires_grad_(requires_grad=False)
    nn.init.zeros_(arrays[0].weight)
    nn.init.zeros_(arrays[2].weight)
    for model, zero in ((Adapter(), ["up.weight"]), (head, ["2.weight"]), (arrays, ["0.weight", "2.weight"])):
        assert check_initialisation(model) == []
        assert starts_at_zero(model) == zero
        monitor, sink = watched()
        with monitor, monitor.round(0, model):
            pass
        assert not sink.events("initialisation")
        assert [(e.level, e.data["layers"]) for e in sink.events("initialisation.zero")] == [("info", zero)]
    assert check_initialisation(Vision()) == []
