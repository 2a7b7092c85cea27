# SPDX-License-Identifier: Apache-2.0
"""Every fault acts where it says, on whom and when it says, and the same each time."""

from __future__ import annotations

import errno
import math
import re
import resource
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from fedvitals.errors import ConfigError
from fedvitals.lab.data.partition import ClassesPerClient
from fedvitals.lab.faults import language
from fedvitals.lab.faults import table as fault_table
from fedvitals.lab.faults.fault import RunFault
from fedvitals.lab.faults.table import FAULTS
from fedvitals.lab.local import SGD, Adam, Local
from support.conditions import holds_for_each
from support.lab.faulty_training import (
    CLASSES,
    GRADIENT,
    KINDS,
    LAYOUT,
    NODES,
    Settings,
    bits,
    changed,
    data,
    fault_of,
    first_model,
    model,
    outcome,
)

# Where each of them shows, of what `outcome` looks at.
ACTS_ON = {
    kind: places
    for places, kinds in {
        ("y",): "label_noise label_flip",
        ("x",): "input_noise input_scale group_left_behind channels_swapped",
        ("x", "y"): "missing_classes dominant_client backdoor distributed_backdoor edge_case_backdoor",
        ("x", "y", "sent"): "neurotoxin model_replacement",
        ("y", "sent"): "sybils",
        ("order",): "same_batch",
        ("local",): "wrong_learning_rate",
        ("gradients",): "frozen_layer not_finite float16_underflow",
        ("state",): "broken_batch_norm",
        ("raised",): "crash memory_hog disk_full",
        ("samples",): "wrong_sample_count zero_weight",
        ("sent",): "stale_update free_rider duplicate sign_flip scaling gaussian little_is_enough inner_product "
        "shape_mismatch dtype_mismatch optimal_little_is_enough optimal_inner_product mimic",
        ("journey",): "drop_out straggler timeout lost_message corrupted_message clock_skew",
        ("silenced",): "telemetry_lost",
        ("server",): "server_rate_too_high server_rate_too_low",
        ("initial",): "exploding_initialisation vanishing_initialisation dead_units saturated_units",
        ("experiment", "x", "y"): "overfitting",
        ("experiment",): "client_drift",
    }.items()
    for kind in kinds.split()
}
AGAINST_OTHERS = (
    *("little_is_enough", "inner_product", "optimal_little_is_enough", "optimal_inner_product", "mimic", "sybils"),
    *("duplicate", "group_left_behind", "dominant_client", "distributed_backdoor"),
)
HEALTHY = outcome((), 2, "c1")


# -- all of them ------------------------------------------------------------------------------------------------------


def test_the_whole_taxonomy_is_there():
    assert set(ACTS_ON) == set(KINDS)
    assert len(KINDS) == len(FAULTS) - len(language.FAULTS) == 53


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_it_acts_where_it_says_and_the_same_each_time(kind):
    first = outcome([fault_of(kind)], 2, "c1")
    assert changed(first, HEALTHY) == set(ACTS_ON[kind])
    assert not changed(outcome([fault_of(kind)], 2, "c1"), first)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not issubclass(KINDS[kind], RunFault)])
def test_nothing_changes_before_after_and_beside_it(kind):
    fault = fault_of(kind, since=2, until=3)
    for number, there in ((1, False), (2, True), (3, True), (4, False)):
        assert bool(changed(outcome([fault], number, "c1"), outcome((), number, "c1"))) is there
    if not kind.startswith("server"):
        assert not changed(outcome([fault], 2, "c2"), outcome((), 2, "c2"))
        if kind in AGAINST_OTHERS:
            with pytest.raises(ConfigError, match="a list of some of the clients"):
                msgspec.structs.replace(fault, nodes="all")
        else:
            everybody = msgspec.structs.replace(fault, nodes="all")
            assert changed(outcome([everybody], 2, "c2"), outcome((), 2, "c2"))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_described_the_same_in_toml(kind):
    fault = fault_of(kind)
    assert type(fault)(**{f: getattr(fault, f) for f in fault.__struct_fields__}) == fault
    assert hash(fault) == hash(fault_of(kind))
    table = {key: value for key, value in msgspec.to_builtins(fault).items() if value is not None}
    assert table["kind"] == kind
    assert msgspec.convert(table, KINDS[kind]) == fault
    with pytest.raises(msgspec.ValidationError, match="unknown"):
        msgspec.convert({**table, "strenght": 1}, KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_its_truth_says_what_a_detector_should(kind):
    told = fault_of(kind).truth(NODES)
    assert told["kind"] == kind
    assert told["family"] in ("convergence", "client", "aggregation", "gradient", "system")
    assert re.fullmatch("[a-z_]+", told["issue"])
    everywhere = list(NODES) if issubclass(KINDS[kind], RunFault) else ["server"] if "server" in kind else None
    assert told["nodes"] == (everywhere or list(fault_of(kind).nodes))
    assert (told["since"], told["until"]) == (0, None)
    assert set(KINDS[kind].__struct_fields__) <= set(told)
    assert len(KINDS[kind].__doc__.split("\n")[0]) > 20  # one line of what happens in real life


def test_healthy_clients_pay_nothing():
    some = [fault_of(kind, since=2) for kind in KINDS if not issubclass(KINDS[kind], RunFault)]
    for hook in ("data", "local", "state", "gradient", "step", "update", "journey"):
        assert not fault_table.any_active(hook, some, 2, "c2")
        assert not fault_table.any_active(hook, some, 1, "c1")
        assert fault_table.any_active(hook, some, 2, "c1")
    assert fault_table.gradient_fault(some, 2, "c2", 7) is None
    assert not fault_table.any_collusion(some, 1)
    assert fault_table.any_collusion(some, 2)
    x, y = data()
    same_x, same_y = fault_table.apply_data(some, 2, "c2", x, y, CLASSES, 7)
    assert same_x is x
    assert same_y is y


def test_two_faults_of_one_kind_draw_apart_and_seeds_too():
    noise = fault_of("input_noise")
    (once, _), (twice, _) = (
        fault_table.apply_data(some, 0, "c1", *data(), CLASSES, 7) for some in ([noise], [noise] * 2)
    )
    x = data()[0]
    added, second = once - x, twice - once
    assert float(torch.corrcoef(torch.stack((added.flatten(), second.flatten())))[0, 1]) < 0.2
    assert not torch.equal(fault_table.apply_data([noise], 0, "c1", *data(), CLASSES, 8)[0], once)
    other = fault_table.apply_data([fault_of("input_noise", since=0)], 5, "c1", *data(), CLASSES, 7)[0]
    assert torch.equal(other, once)  # in every round the same


def test_one_node_may_have_several_and_what_breaks_the_shape_comes_last():
    several = [
        fault_of("shape_mismatch", missing=2),
        fault_of("dtype_mismatch"),
        fault_of("sign_flip"),
        fault_of("wrong_sample_count"),
    ]
    found = outcome(several, 2, "c1")
    assert found["sent"].dtype == torch.float64
    wanted = outcome([fault_of("sign_flip")], 2, "c1")["sent"][:-2].double()
    assert torch.equal(found["sent"], wanted)
    assert found["samples"] == 51 * 20


def test_nobody_elses_tensors_are_written_into():
    for kind in KINDS:
        found = outcome([fault_of(kind)], 2, "c1")
        assert bits(found["start"]) == bits(HEALTHY["start"]), kind


# -- data -------------------------------------------------------------------------------------------------------------


def drawn(kind, **settings):
    return fault_table.apply_data([fault_of(kind, **settings)], 0, "c1", *data(), CLASSES, 7)


@pytest.mark.parametrize(("rate", "low", "high"), [(1.0, 60, 60), (0.5, 20, 40), (0.1, 1, 14)])
def test_label_noise(rate, low, high):
    y = data()[1]
    noisy = drawn("label_noise", rate=rate)[1]
    assert low <= int((noisy != y).sum()) <= high
    assert int(noisy.min()) >= 0
    assert int(noisy.max()) < CLASSES
    assert noisy.dtype == y.dtype


def test_label_flip():
    y = data()[1]
    flipped = drawn("label_flip", source=2, target=4)[1]
    assert torch.equal(flipped, torch.where(y == 2, 4, y))
    some = drawn("label_flip", source=2, target=4, rate=0.5)[1]
    assert 0 < int((some != y).sum()) < int((y == 2).sum())


def test_missing_classes():
    x, y = data()
    fewer_x, fewer_y = drawn("missing_classes", missing=[1, 3])
    kept = (y != 1) & (y != 3)
    assert torch.equal(fewer_x, x[kept])
    assert torch.equal(fewer_y, y[kept])
    with pytest.raises(ConfigError, match="has no sample left"):
        drawn("missing_classes", missing=range(CLASSES))


def test_inputs():
    x = data()[0]
    assert torch.equal(drawn("input_scale", factor=255)[0], x * 255)
    noise = drawn("input_noise", deviation=2.0)[0] - x
    assert float(noise.std()) == pytest.approx(2 * float(x.std()), rel=0.15)
    assert torch.equal(drawn("group_left_behind")[0], x.flip(-1))
    half = drawn("group_left_behind", share=0.5)[0]
    turned = (half != x).any(1)
    assert 15 < int(turned.sum()) < 45
    assert torch.equal(half[turned], x.flip(-1)[turned])
    images = torch.rand(4, 3, 5, 5)
    upside_down = fault_table.apply_data([fault_of("group_left_behind")], 0, "c1", images, torch.zeros(4), CLASSES, 7)[
        0
    ]
    assert torch.equal(upside_down[2, 1, 0, 4], images[2, 1, 4, 0])


def test_one_client_dominates():
    (x, y), (more_x, more_y) = data(), drawn("dominant_client", factor=3)
    assert len(more_y) == len(more_x) == 3 * len(y)
    assert torch.equal(more_x[60:120], x)
    assert torch.equal(more_y[120:], y)
    numbers = torch.rand(4, 2)  # targets that are no classes
    (fault,) = [fault_of("dominant_client", factor=3)]
    more = fault_table.apply_data([fault], 0, "c1", torch.rand(4, 5), numbers, 0, 7)[1]
    assert torch.equal(more, torch.cat([numbers] * 3))


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9), Adam(0.1)])
def test_wrong_learning_rate(optimizer):
    settings = Local(iterations=4, optimizer=optimizer, batch=8)
    found = fault_table.apply_local([fault_of("wrong_learning_rate", factor=0.1)], 0, "c1", settings)
    wanted = msgspec.structs.replace(optimizer, learning_rate=0.1 * 0.1)
    assert found == msgspec.structs.replace(settings, optimizer=wanted)


@pytest.mark.parametrize(("layer", "name"), [(0, "0.weight"), (-1, "3.weight"), (1, "1.weight"), ("3.bias", "3.bias")])
def test_layers_are_found_by_name_and_by_place(layer, name):
    frozen = LAYOUT.views(outcome([fault_of("frozen_layer", layer=layer)], 0, "c1")["gradients"][1])
    assert {key for key, gradient in frozen.items() if not gradient.any()} == {name}
    assert holds_for_each((gradient == GRADIENT).all() for key, gradient in frozen.items() if key != name)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_not_finite_at_one_layer_and_step(value):
    gradients = outcome([fault_of("not_finite", value=value, layer=-1, at_step=1)], 0, "c1")["gradients"]
    assert torch.isfinite(gradients[[0, 2]]).all()
    wrong = {name: g for name, g in LAYOUT.views(gradients[1]).items() if not torch.isfinite(g).all()}
    assert [*wrong] == ["3.weight"]
    bad = wrong["3.weight"][0, 0]
    assert math.isnan(bad) if value == "nan" else float(bad) == float(value)
    assert int((~torch.isfinite(gradients)).sum()) == 1


def test_broken_batch_norm_spoils_evaluation_and_not_training():
    state = outcome([fault_of("broken_batch_norm", factor=100.0)], 0, "c1")["state"]
    healthy, broken = model(), model()
    LAYOUT.load(broken, state)
    x = data()[0]
    with torch.no_grad():
        assert torch.allclose(healthy(x), broken(x))
        assert not torch.allclose(healthy.eval()(x), broken.eval()(x), atol=0.1)


def test_machines():
    def stepped(fault, step):
        fault_table.apply_step([fault], 0, "c1", step)

    for kind, error, words in (
        ("crash", RuntimeError, "on purpose"),
        ("disk_full", OSError, "No space left on device"),
        ("memory_hog", MemoryError, "1 MB could not be allocated"),
    ):
        fault = fault_of(kind, at_step=2)
        stepped(fault, 0)
        stepped(fault, 1)
        with pytest.raises(error, match=words) as raised:
            stepped(fault, 2)
        assert kind != "disk_full" or raised.value.errno == errno.ENOSPC


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_memory_hog_takes_it_and_gives_it_back():
    def now():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    before, most = now(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    hog = KINDS["memory_hog"](nodes=["c1"], megabytes=int(most - before) + 100)
    fault_table.apply_step([hog], 0, "c1", 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 > most + 50
    assert now() < before + 50


# -- the first model --------------------------------------------------------------------------------------------------


def test_initialisations_scale_matrices_and_leave_norms_alone():
    for kind, factor in (("exploding_initialisation", 10.0), ("vanishing_initialisation", 0.01)):
        before, after = (dict(m.named_parameters()) for m in (model(), first_model(fault_of(kind))))
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor * factor if tensor.dim() > 1 else tensor), name


@pytest.mark.parametrize(("kind", "activation"), [("dead_units", nn.ReLU()), ("saturated_units", nn.Tanh())])
def test_units_without_a_slope(kind, activation):
    for found, least in ((first_model(fault_of(kind, share=0.5)), 3), (first_model(fault_of(kind, share=1.0)), 6)):
        struck = found[0].bias.abs() == 100
        assert int(struck.sum()) == least
        activation(found[0](data()[0])).sum().backward()
        assert not found[0].weight.grad[struck].any()
        assert torch.equal(found[0].bias[~struck], model()[0].bias[~struck])


# -- settings of the whole --------------------------------------------------------------------------------------------


def test_overfitting_is_little_data_and_long_training():
    x, y = drawn("overfitting", samples=12)
    assert len(x) == len(y) == 12
    changed_to = fault_table.apply_experiment(Settings((fault_of("overfitting", epochs=30),)))
    assert changed_to.local == Local(iterations=None, epochs=30)
    assert len(drawn("overfitting", samples=500)[1]) == 60  # no more than there are


def test_client_drift_is_few_classes_and_fast_long_training():
    found = fault_table.apply_experiment(Settings((fault_of("client_drift", classes=2, iterations=80, factor=4.0),)))
    assert found.partition == ClassesPerClient(2)
    assert found.local.iterations == 80
    assert found.local.optimizer.learning_rate == pytest.approx(4 * Local().optimizer.learning_rate)
