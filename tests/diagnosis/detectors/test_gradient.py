# SPDX-License-Identifier: Apache-2.0
"""Each issue of the gradients on the fault that fires it, and silence on its healthy twin."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedvitals import Monitor, lab
from fedvitals.diagnosis.detectors.gradient import DETECTORS, exploding, poor_initialisation
from fedvitals.diagnosis.detectors.signals import bias_of, layer_profile, matrix_layers, quiet_quantile, still_units
from fedvitals.records import Event, Layer, LayerStats, LayerTable, Run, Where
from fedvitals.store import MemoryStore
from support.healthy.loops import Task, blobs, classifier, log_accuracy, regression, sgd, summed_loss
from support.histories import findings_of, history_of, lab_history

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes


def tanh_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def half_frozen_model():
    model = tanh_model()
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    return model


TANH = lab.Own(tanh_model, stackable=True)
MLP = lab.MLP(hidden=(32, 16))


def issues(history, rounds=3):
    return {found.issue for number in range(rounds) for found in findings_of(DETECTORS, history, number)}


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [("baseline", set()), ("exploding", {"EXPLODING_GRADIENT"}), ("vanishing", {"VANISHING_GRADIENT"})],
)
def test_the_papers_three_scenarios_are_told_apart(scenario, expected):
    clip = lab.Clip() if scenario == "baseline" else None
    model = lab.PaperCNN(scenario=scenario, channels=(4, 8))
    local = lab.Local(iterations=4, optimizer=lab.Adam(), clip=clip)
    history = lab_history(model=model, local=local, clients=3)
    assert issues(history) & {"EXPLODING_GRADIENT", "VANISHING_GRADIENT"} == expected
    assert bool(issues(history)) == bool(expected)


@pytest.mark.parametrize(
    ("model", "fault", "expected"),
    [
        (MLP, lab.exploding_initialisation(factor=10.0), {"EXPLODING_GRADIENT", "POOR_INITIALISATION"}),
        (MLP, lab.vanishing_initialisation(factor=0.05), {"VANISHING_GRADIENT", "POOR_INITIALISATION"}),
        (MLP, lab.dead_units(share=0.75), {"DEAD_UNITS"}),
        (TANH, lab.saturated_units(share=0.75), {"SATURATED_UNITS"}),
    ],
)
def test_fault_fires_and_twin_is_silent(model, fault, expected):
    assert expected <= issues(lab_history(model=model, faults=[fault]))
    assert issues(lab_history(model=model)) == set()


NUMBERS = {"dataset": lab.Synthetic(samples=600, targets="numbers"), "model": MLP}
TAGS = {
    "dataset": lab.Synthetic(samples=400, classes=6, sequence=8, vocabulary=12, targets="tokens"),
    "model": lab.GPT(width=16, heads=2, layers=1),
}
ADAM = lab.Local(iterations=10, optimizer=lab.adam(learning_rate=3e-3))
NORMALISED = [
    {"model": lab.CNN(channels=(4, 8), norm=norm), "local": lab.Local(epochs=1, optimizer=lab.sgd(0.05, momentum=0.9))}
    for norm in ("layer", "batch")
]


@pytest.mark.parametrize("setting", [NUMBERS | {"local": ADAM}, TAGS | {"local": ADAM}, *NORMALISED])
def test_weights_that_are_all_far_too_small_are_a_problem_from_the_first_round(setting):
    """A blind guess's loss is unknown, or the model learns soon, because layer and batch norms restore signals."""

    def first(**changes):
        return {f.severity for f in poor_initialisation(lab_history(**setting, **changes, rounds=1), 0)}

    assert first(faults=[lab.vanishing_initialisation(factor=0.01)]) == {"warning"}
    assert first() == set()


def test_units_are_named_with_layer_and_share():
    history = lab_history(model=MLP, faults=[lab.dead_units(share=0.75)])
    (found,) = findings_of(DETECTORS, history, 2)
    assert (found.issue, found.where.layer, found.evidence["since"]) == ("DEAD_UNITS", "dense1.weight", 1)
    assert found.evidence["numbers"][0]["value"] >= 0.75
    assert still_units(history, 2)[0].onward >= 0.75  # the next layer's weights stand still with them


def test_deep_network_that_begins_with_resting_units_and_learns_gets_no_more_than_a_note():
    """Far from the input, all samples look alike at first: units are on for all of them, or off."""
    local = lab.Local(iterations=8, optimizer=lab.adam(learning_rate=3e-3))
    history = lab_history(model=lab.MLP(hidden=(32,) * 5), local=local, rounds=16)
    found = [f for number in range(16) for f in findings_of(DETECTORS, history, number)]
    losses = history.series("loss", None)[1]
    assert losses[-1] < 0.8 * losses[0]
    assert {(f.issue, f.severity) for f in found} == {("DEAD_UNITS", "note")}
    assert len({f.where.round for f in found}) == len(found)  # one for all layers


def test_narrow_deep_network_has_small_gradients_that_do_not_vanish():
    """It begins to learn after some 40 rounds; what is said before that must not be critical."""
    history = lab_history(model=lab.MLP(hidden=(16, 16, 16)), rounds=4, seed=0)
    assert max(layer_profile(history, number).top for number in range(4)) < 0.06
    assert not issues(history, 4) & {"VANISHING_GRADIENT", "EXPLODING_GRADIENT"}


def test_compressed_updates_are_no_dead_units():
    assert issues(lab_history(model=MLP, compression=lab.top_k(0.05))) == set()


def test_layer_frozen_on_purpose_is_no_vanished_one():
    assert issues(lab_history(model=lab.Own(half_frozen_model))) == set()


def test_logistic_regression_may_begin_at_zero():
    assert issues(lab_history(model="logistic")) == set()


class Unmeasured:
    """A history without the gradient scale."""

    def __init__(self, history):
        self._history = history

    def __getattr__(self, name):
        return getattr(self._history, name)

    def latest(self, name, round_index):
        return {} if name.startswith("scale.") else self._history.latest(name, round_index)


def test_an_explosion_names_the_gradient_scale_only_where_it_was_measured():
    history = lab_history(model=MLP, faults=[lab.exploding_initialisation(factor=10.0)])
    (found,) = exploding(history, 0)
    assert "The gradient scale (GSC) is " in found.message
    (found,) = exploding(Unmeasured(history), 0)
    assert "gradient scale" not in found.message


def test_gradients_that_jump_inside_a_round():
    def norms(jumping, loss):
        values = {f"c{i}": [1.0, 1.1, 0.9, 1.0, 40.0 if i < jumping else 1.0] for i in range(10)}
        return history_of(
            {("loss", None): [2.0, 1.5, 1.0, 0.9, loss]}
            | {("gradient.norm_max", node): v for node, v in values.items()}
            | {("gradient.norm_last", node): v for node, v in values.items()}
        )

    (found,) = exploding(norms(4, 1.6), 4)
    assert found.evidence["clients"] == ["c0", "c1", "c2", "c3"]
    assert not list(exploding(norms(4, 1.6), 3))  # no look ahead
    assert not list(exploding(norms(1, 1.6), 4))  # one client alone is a matter of the client
    assert not list(exploding(norms(4, 0.8), 4))  # the loss fell nevertheless


def test_pressure_has_no_unit():
    """A wider network has larger norms; its pressure at the start is the same within a factor of two."""
    tops = []
    for width in (64, 1024):
        found = layer_profile(lab_history(model=lab.MLP(hidden=(width,)), rounds=1), 0)
        assert found is not None
        assert found.chance == pytest.approx(np.log(10))
        tops.append(float(np.nanmax(found.elasticity)) / found.chance)
    assert 0.5 < tops[0] / tops[1] < 2


def test_norm_layers_are_told_by_their_size():
    names = ("conv.weight", "conv.bias", "norm.weight", "norm.bias", "lstm.weight_ih_l0", "lstm.bias_ih_l0")
    assert matrix_layers(names, np.array([72.0, 8, 8, 8, 64, 32])) == [0, 4]
    assert bias_of("lstm.weight_ih_l0") == "lstm.bias_ih_l0"


def test_quantile_leaves_out_nan():
    values = np.array([[3.0, np.nan], [1.0, np.nan], [np.nan, np.nan], [2.0, np.nan]])
    assert quiet_quantile(values, 0.5)[0] == 2
    assert np.isnan(quiet_quantile(values, 0.5)[1])
    assert np.isnan(quiet_quantile(np.empty((0, 2)), 0.1)).all()


def test_nothing_measured_nothing_found():
    assert issues(history_of({("loss", None): [2.0, 1.0, 0.5]})) == set()
    assert issues(lab_history(model=MLP, probes="light")) == set()


def loop_history(task, seed=0):
    """What a monitor saw of a plain loop."""
    torch.manual_seed(seed)
    store = MemoryStore()
    with Monitor(None, sinks=[store], machine=False, detectors=()) as monitor:
        task(monitor, seed)
    return store.history(monitor.run.id)


def exploding_classifier():
    model = classifier()
    for parameter in model.parameters():
        parameter.data *= 15
    return model


def fading_classifier():
    """Deep and with weights far too small: the last bias alone learns."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), *layers, nn.Linear(32, 4))
    for parameter in model.parameters():
        parameter.data *= 0.02
    return model


def all_zero():
    model = classifier()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def test_gradients_of_another_loss_have_no_chance_level():
    """Labels that clients count tell of classes; numbers do not, whatever the last layer's size."""
    classes = Task(blobs, classifier, functional.cross_entropy, sgd(0.1), rounds=1)
    assert layer_profile(loop_history(classes), 0).chance == pytest.approx(np.log(4))
    for task in (
        regression(1.0, functional.mse_loss, 1e-2, targets=4),
        replace(classes, loss=summed_loss),
        replace(classes, tells_data=False),
    ):
        assert np.isnan(layer_profile(loop_history(replace(task, rounds=1)), 0).chance)


def test_what_is_wrong_with_the_start_is_found_in_plain_loops_as_well():
    """By the clients' labels, and by an accuracy where no loss is logged."""
    task = Task(blobs, exploding_classifier, functional.cross_entropy, sgd(1e-3), rounds=3)
    assert "EXPLODING_GRADIENT" in issues(loop_history(task))
    fading = Task(blobs, fading_classifier, functional.cross_entropy, sgd(1e-3), log_accuracy, rounds=3)
    assert "VANISHING_GRADIENT" in issues(loop_history(fading))
    zeros = Task(blobs, all_zero, functional.cross_entropy, sgd(0.1), log_accuracy, rounds=3)
    assert {"VANISHING_GRADIENT", "POOR_INITIALISATION"} <= issues(loop_history(zeros))


class SmallAttention(nn.Module):
    """Attention over four tokens with weights as BERT begins with: its queries and keys hardly matter at first."""

    def __init__(self):
        super().__init__()
        self.embedding, self.place = nn.Embedding(12, 16), nn.Embedding(4, 16)
        self.norm = nn.LayerNorm(16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 3)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens) + self.place(torch.arange(4)))
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 4
        return self.head((x + self.out(scores.softmax(-1) @ self.value(x))).mean(1))


def token_sums(seed):
    x = torch.randint(12, (600, 4), generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1) % 3


def test_attention_that_begins_uniform_has_no_vanished_gradient():
    """Its queries get a tiny part of the gradient of others, but the embeddings before them get theirs."""
    history = loop_history(Task(token_sums, SmallAttention, functional.cross_entropy, sgd(0.01), rounds=3))
    pressure = dict(zip(layer_profile(history, 0).names, layer_profile(history, 0).pressure, strict=True))
    assert pressure["query.weight"] < 5e-4 * max(pressure.values()) < pressure["embedding.weight"]
    assert "VANISHING_GRADIENT" not in issues(history)


def test_remarks_of_older_runs_about_adapters_count_for_nothing():
    """They were one for each matrix of zeros: a fault only where more than half of the model is."""
    store = MemoryStore()
    layers = tuple(Layer(f"{i}.{name}", (4, 4), "float32") for i in range(2) for name in ("base.weight", "A", "B"))
    table = LayerTable("parameter", layers)
    store.write(
        [
            Run("r", "older", tables=(table,)),
            LayerStats(Where("r", 12, "c0"), 1.0, "weight", np.ones((6, 9)), table.digest, "c0", 1),
            *(
                Event(Where("r", 0), 0.0, "warning", "initialisation", f"{i}.B: all values equal 0: every unit", {})
                for i in range(2)
            ),
        ]
    )
    assert [*poor_initialisation(store.history("r"), 12)] == []


def test_zeros_beside_nan_are_no_vanished_gradient():
    """The gradients of a dead unit stay 0 in a model whose other gradients are all NaN."""
    store = MemoryStore()
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].bias[0] = -1e3
        model[0].weight[1:] = np.nan
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x, y = torch.randn(4, 8), torch.arange(4) % 3
    with Monitor(None, sinks=[store], machine=False) as monitor, monitor.round(0, model), monitor.client("c0", model):
        for _ in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert layer_profile(store.history(monitor.run.id), 0).zero.tolist() == [False, False]
