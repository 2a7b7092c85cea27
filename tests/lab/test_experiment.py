# SPDX-License-Identifier: Apache-2.0
"""Experiments as Python and as TOML: the same, or refused before anything runs."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvitals import lab
from fedvitals.errors import ConfigError

FULL = lab.Experiment(
    name="all of it",
    dataset=lab.synthetic(samples=500),
    partition=lab.classes_per_client(2),
    model=lab.mlp(hidden=(8, 4)),
    local=lab.Local(
        epochs=2, batch=8, optimizer=lab.adam(learning_rate=0.01), clip=lab.Clip(0.5, "whole"), proximal=0.1
    ),
    clients=12,
    participation=0.5,
    rounds=3,
    topology=lab.Hierarchical(edges=3),
    aggregator=lab.multi_krum(faulty=0),
    compression=lab.top_k(0.1),
    faults=[
        lab.label_noise(nodes=["c4"], rate=0.8, since=1),
        lab.not_finite(nodes=["c1"], layer=0, at_step=1),
        lab.drop_out(nodes="all", rate=0.1),
    ],
    network=lab.Network(links={"4g": 0.5, "3g": 0.5}, deadline_seconds=30.0),
    seed=5,
    repeats=2,
)


@pytest.mark.parametrize("experiment", [lab.Experiment(), FULL], ids=["default", "full"])
def test_toml_and_back_is_the_same(experiment):
    assert lab.read(experiment.to_toml()) == experiment


def test_the_default_is_an_empty_file():
    assert lab.Experiment().to_toml() == ""
    assert lab.read("") == lab.Experiment()


@settings(max_examples=50, deadline=None)
@given(
    clients=st.integers(1, 1000),
    rounds=st.integers(1, 1000),
    seed=st.integers(0, 2**40),
    participation=st.floats(0.01, 1.0),
    name=st.text(max_size=20),
)
def test_scalars_survive_toml(clients, rounds, seed, participation, name):
    experiment = lab.Experiment(clients=clients, rounds=rounds, seed=seed, participation=participation, name=name)
    assert lab.read(experiment.to_toml()) == experiment


def test_every_kind_survives_toml():
    for field, kinds in lab.experiment.CHOICES.items():
        for kind in kinds.values():
            try:
                chosen = kind()
            except TypeError:
                continue  # it has no defaults: Krum must be told how many are faulty
            experiment = lab.Experiment(**{field: chosen}, clients=40, network=lab.Network())
            assert lab.read(experiment.to_toml()) == experiment, f"{field} {kind}"


def test_a_kind_by_its_name_alone():
    assert lab.read('model = "mlp"\ndataset = "fashion-mnist"').model == lab.mlp()
    assert lab.Experiment(topology="rings").topology == lab.Rings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("clints = 5", "Did you mean 'clients'"),
        ('model = "resnet"', "resnet18"),
        ('partition = {kind = "dirchlet"}', "Did you mean 'dirichlet'"),
        ('partition = {kind = "dirichlet", alpa = 1}', "Did you mean 'alpha'"),
        ("partition = {alpha = 1}", "needs a kind"),
        ('partition = {kind = "dirichlet", alpha = "much"}', "float"),
        ("clients = 0", "at least 1"),
        ('clients = "many"', "int"),
        ("participation = 0", "above 0"),
        ("rounds = 1.5", "int"),
        ("[local]\niterations = 3\nepochs = 2", "give one of them"),
        ("[local]\nbatch = 0", "at least 1"),
        ('[local.optimizer]\nkind = "adam"\nlearning_rate = -1', "above 0"),
        ('[topology]\nkind = "hierarchical"\nedges = 50', "number of clients"),
        ('[[faults]]\nkind = "label_nois"\nnodes = ["c1"]', "Did you mean 'label_noise'"),
        ('[[faults]]\nkind = "label_noise"\nnodes = ["c1"]\nrate = 3', "rate"),
        ('[topology]\nkind = "asynchronous"', "network"),
        ("rounds = = 3", "no TOML"),
        ('[local.optimizer]\nkind = "adm"', "Did you mean 'adam'"),
        ("[local]\niteration = 5", "Did you mean 'iterations'"),
        ("[local.clip]\nlimt = 5", "Did you mean 'limit'"),
        ('[aggregator]\nkind = "krum"\nfaulty = 9', "at least 21 updates"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_valid_choices(text, says):
    with pytest.raises(ConfigError, match=says):
        lab.read(text)


def test_changes_by_dotted_names_win():
    changed = lab.read('model = "mlp"', {"clients": 50, "local.batch": 4, "model.hidden": [3], "topology": "rings"})
    assert (changed.clients, changed.local.batch, changed.model.hidden) == (50, 4, (3,))
    assert changed.topology == lab.Rings()
    with pytest.raises(ConfigError, match="has no keys"):
        lab.read("clients = 5", {"clients.more": 1})


def test_python_is_checked_as_toml_is():
    with pytest.raises(ConfigError, match="clients"):
        lab.Experiment(clients="5")
    with pytest.raises(ConfigError, match="batch"):
        lab.Experiment(local=lab.Local(batch=2.5))
    with pytest.raises(ConfigError, match="rate"):
        lab.Experiment(faults=[lab.label_noise(nodes=["c1"], rate=True)])
    with pytest.raises(ConfigError, match="list"):
        lab.Experiment(faults=lab.sign_flip(nodes=["c1"]))


def test_what_was_probably_meant_is_said():
    import torch

    for field, value, says in (
        ("model", lambda: torch.nn.Linear(4, 3), "lab.Own"),
        ("model", torch.nn.Linear(4, 3), "lab.Own"),
        ("dataset", (torch.zeros(3, 2), torch.zeros(3)), "lab.Arrays"),
        ("aggregator", lab.trimmed_mean, "not called"),
        ("topology", lab.Rings, "not called"),
        ("partition", len, "parts"),
        ("local", lab.Local(optimizer=torch.optim.Adam), "lab.adam"),
        ("faults", ["label_nois"], "Did you mean 'label_noise'"),
    ):
        with pytest.raises(ConfigError, match=says):
            lab.Experiment(**{field: value})
    for call in (
        lambda: lab.run("x.toml"),
        lambda: lab.run(lab.Experiment(), "runs.db"),
        lambda: lab.run(lab.Experiment(), resume=True),
        lambda: lab.run(lab.Experiment(), device="tpu"),
        lambda: lab.run(lab.Experiment(), workers="2"),
    ):
        with pytest.raises(ConfigError):
            call()
    assert lab.read("", {"local.optimizer.learning_rate": 0.1}).local.optimizer == lab.sgd(learning_rate=0.1)
    assert lab.read("", {"local.optimizer": "adam"}).local.optimizer == lab.adam()


def test_own_objects_run_but_have_no_toml():
    import torch

    x, y = torch.randn(60, 4), torch.arange(60) % 3
    own = lab.Experiment(
        dataset=lab.Arrays(x, y), model=lab.Own(lambda: torch.nn.Linear(4, 3)), clients=3, rounds=2,
        local=lab.Local(iterations=2),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="your own object"):
        own.to_toml()
    assert lab.run(own, engine="sequential").accuracy is not None


def test_an_experiment_cannot_be_changed():
    with pytest.raises(AttributeError):
        FULL.clients = 3
    assert msgspec.structs.replace(FULL, clients=30).clients == 30


def test_unknown_parts_of_the_lab_are_answered_with_what_exists():
    with pytest.raises(AttributeError, match="Did you mean 'label_noise'"):
        lab.label_nois  # noqa: B018
    assert "trimmed_mean" in dir(lab)
