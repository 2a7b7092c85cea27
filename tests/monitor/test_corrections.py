# SPDX-License-Identifier: Apache-2.0
"""Corrections in a plain loop, by the one line of docs/cure.md: what each kind does, what is tried, kept and undone."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fedvitals as fv
from fedvitals.records import Action, Where
from fedvitals.store import MemoryStore
from support.conditions import holds_for_each
from support.paths import ROOT

SNIPPET = next(
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "cure.md").read_text(), re.DOTALL)
    if "for r in range" in block
)
LINE = "        states, samples = monitor.corrections().apply(states, samples, start=model)  # the line\n"


# -- the loop of docs/cure.md -----------------------------------------------------------------------------------------


def average(states, samples):
    total = sum(samples.values())
    return {
        name: sum(states[client][name] * (samples[client] / total) for client in states)
        for name in next(iter(states.values()))
    }


def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def digits_loop(cure="auto", *, noisy=False, rounds=22, snippet=SNIPPET, since=6):
    """Run docs/cure.md's loop on digits with eight clients, c3 the largest. `noisy`: its labels are off by one.

    Returns the model, its accuracy on samples that no correction was judged by, and the actions.
    """
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    parts = [[0], [1], [2], [3, 4, 5, 6], [7], [8], [9], [10]]  # of eleven: c3 has as much as four others
    places = [torch.arange(1200)[[j % 11 in own for j in range(1200)]] for own in parts]
    own = {f"c{i}": (x[held], y[held]) for i, held in enumerate(places)}
    loaders = {name: DataLoader(TensorDataset(*pair), 16, shuffle=True) for name, pair in own.items()}
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    memory = MemoryStore(everything=True)
    validated = 0

    @torch.no_grad()
    def validate(model):
        nonlocal validated
        validated += 1
        if noisy and validated == since:
            own["c3"][1].add_(1).remainder_(10)
        output = model(x[1200:1500])
        right = (output.argmax(1) == y[1200:1500]).float().mean()
        return {"loss": float(functional.cross_entropy(output, y[1200:1500])), "accuracy": float(right)}

    def monitor(store, **settings):
        del store
        return fv.Monitor(None, sinks=[memory], machine=False, strict=True, **{**settings, "cure": cure})

    names = {"fv": type("fv", (), {"Monitor": staticmethod(monitor)}), "copy": copy, "F": functional, "train": train}
    names |= {"average": average, "validate": validate, "loaders": loaders, "model": model, "rounds": rounds}
    exec(snippet, names)
    with torch.no_grad():
        accuracy = float((model(x[1500:]).argmax(1) == y[1500:]).float().mean())
    run = names["monitor"].run.id
    return model, accuracy, [*memory.records(run, Action)]


def bits(model):
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def test_nothing_changes_unless_the_user_wants_it():
    """With the line and without it, and under every setting that applies nothing: the same bits."""
    without, _, _ = digits_loop("suggest", noisy=True, rounds=9, snippet=SNIPPET.replace(LINE, ""))
    assert LINE in SNIPPET
    for cure in ("off", "suggest"):
        model, _, actions = digits_loop(cure, noisy=True, rounds=9)
        assert bits(model) == bits(without)
        assert {action.status for action in actions} <= {"suggested"}


def test_a_healthy_loop_is_left_alone():
    corrected, _, actions = digits_loop("auto", rounds=9)
    assert not actions
    assert bits(corrected) == bits(digits_loop("off", rounds=9)[0])


@pytest.mark.thorough
def test_corrections_are_tried_undone_and_kept_and_the_model_is_better_for_it():
    _, healthy, _ = digits_loop("off")
    _, ill, suggested = digits_loop("suggest", noisy=True)
    _, cured, actions = digits_loop("auto", noisy=True)
    assert ill < healthy - 0.3
    assert cured > healthy - 0.02
    assert {action.status for action in suggested} == {"suggested"}
    steps = [(action.kind, action.status) for action in actions if action.status != "suggested"]
    kinds = [kind for kind, status in steps if status == "trial"]
    assert steps[0] == ("quarantine", "trial")
    assert (kinds[-1], "applied") in steps
    assert all((kind, "undone") in steps for kind in kinds[:-1])
    assert ("roll_back", "applied") in steps
    assert "suspect_samples" in next(a.arguments["text"] for a in actions if a.kind == "advise")


# -- each kind --------------------------------------------------------------------------------------------------------


def action(kind, target=None, **arguments):
    return Action(Where("r"), 0.0, "TEST", kind, target, {"id": kind, **arguments})


class Loop:
    """A monitor in whose round `prescribed` is in force; what it is told of refusals."""

    def __init__(self, *prescribed, strict=True):
        self.memory, self.refusals, self.prescribed = MemoryStore(), [], prescribed
        self.monitor = fv.Monitor(None, sinks=[self.memory], machine=False, detectors=(), cure="auto", strict=strict)
        self.monitor.host.prescribed = self._prescribe
        self.monitor.host.refused = lambda refused, why: self.refusals.append((refused.kind, why))

    def _prescribe(self, number):
        keep = Action(Where("r", number), 0.0, "", "checkpoint", None, {"keep": list(range(-1, number))})
        return [keep, *self.prescribed]

    def round(self, number, updates, weights=None, **more):
        with self.monitor.round(number):
            return self.monitor.corrections().apply(updates, weights, **more)

    def apply(self, updates, weights=None, **more):
        """Run a single round."""
        with self.monitor:
            return self.round(0, updates, weights, **more)


UPDATES = {name: [np.full(3, value), np.full((2, 2), -value)] for name, value in (("a", 1.0), ("b", 2.0), ("c", 90.0))}
WEIGHTS = {"a": 10, "b": 20, "c": 600}


def test_a_client_in_quarantine_is_in_neither_mapping_and_is_measured():
    loop = Loop(action("quarantine", "c"))
    updates, weights = loop.apply(UPDATES, WEIGHTS)
    assert updates == {name: UPDATES[name] for name in "ab"}
    assert weights == {"a": 10, "b": 20}
    assert loop.memory.history(loop.monitor.run.id).latest("update.norm", 0).keys() == {"a", "b", "c"}


@pytest.mark.parametrize(("how", "weight"), [({"factor": 0.5}, 300.0), ({"samples": 7}, 15.0)])
def test_a_client_is_weighed_otherwise(how, weight):
    """A count that is not believed becomes the median of the others', on whatever scale these are."""
    updates, weights = Loop(action("reweight", "c", **how)).apply(UPDATES, WEIGHTS)
    assert updates == UPDATES
    assert weights == {"a": 10, "b": 20, "c": weight}


FORMS = {
    "list": lambda update: update,
    "mapping": lambda update: {"first": update[0], "second": update[1]},
    "vector": lambda update: np.concatenate([part.ravel() for part in update]),
    "tensors": lambda update: {str(i): torch.tensor(part) for i, part in enumerate(update)},
}


def flat(update):
    arrays = update.values() if isinstance(update, dict) else update if isinstance(update, list) else [update]
    return np.concatenate([np.asarray(array).ravel() for array in arrays])


@pytest.mark.parametrize("form", FORMS)
def test_updates_are_cut_scaled_and_averaged_robustly_in_any_form(form):
    given = {name: FORMS[form](update) for name, update in UPDATES.items()}
    cut, _ = Loop(action("clip_updates", norm=10.0)).apply(given)
    assert [np.linalg.norm(flat(cut[name])) for name in "abc"] == pytest.approx([7**0.5, 2 * 7**0.5, 10.0])
    slower, _ = Loop(action("server_rate", factor=0.25)).apply(given)
    robust, _ = Loop(action("robust_aggregator", rule="median")).apply(given)
    for name, update in given.items():
        assert np.array_equal(flat(slower[name]), 0.25 * flat(update))
        assert np.array_equal(flat(robust[name]), flat(given["b"]))
        assert type(robust[name]) is type(slower[name]) is type(update)


def test_whole_models_are_cut_and_slowed_from_the_model_that_was_sent():
    """Whole numbers, as counters of batches are, stay each client's own."""
    start = {"w": torch.tensor([1.0, 1.0]), "seen": torch.tensor(5)}
    models = {
        name: {"w": torch.tensor([1.0, 1.0 + step]), "seen": torch.tensor(step)} for name, step in [("a", 2), ("b", 8)]
    }
    cut, _ = Loop(action("clip_updates", norm=4.0)).apply(models, start=start)
    assert cut["a"]["w"].tolist() == [1, 3]
    assert cut["b"]["w"].tolist() == [1, 5]
    slower, _ = Loop(action("server_rate", factor=0.5)).apply(models, start=start)
    assert [slower[name]["w"].tolist() for name in "ab"] == [[1, 2], [1, 5]]
    assert [slower[name]["seen"].item() for name in "ab"] == [2, 8]


def test_an_earlier_model_takes_the_place_of_all():
    model = nn.Linear(2, 1)
    first = copy.deepcopy(model.state_dict())
    trained = {name: {"weight": torch.ones(1, 2), "bias": torch.ones(1)} for name in "ab"}
    loop = Loop()
    with loop.monitor:
        loop.round(0, trained, start=model)
        with torch.no_grad():
            model.weight.add_(7.0)
        loop.prescribed = (action("roll_back", restore=-1),)
        states, weights = loop.round(1, trained, start=model)
        assert weights == {"a": 1.0, "b": 1.0}
        assert holds_for_each(torch.equal(states[name][key], first[key]) for name in "ab" for key in first)
        assert loop.round(2, trained, start=model)[0] == trained  # once


# -- what cannot be done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prescribed", "words"),
    [
        (action("clip_gradients", limit=1.0), "up to the clients"),
        (action("roll_back", restore=-1), "start=model"),
        (action("clip_updates", norm=-1.0), "above 0"),
        (action("robust_aggregator", rule="astrology"), "Known:"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_what_cannot_be_done_is_refused_with_a_sentence_and_changes_nothing(prescribed, words):
    loop = Loop(prescribed)
    assert loop.apply(UPDATES, WEIGHTS) == (UPDATES, WEIGHTS)
    assert [(kind, words in why) for kind, why in loop.refusals] == [(prescribed.kind, True)]


def test_updates_that_cannot_be_used_are_left_out_and_never_all_of_them():
    broken = [np.full(3, np.nan), np.zeros((2, 2))]
    updates, weights = Loop().apply({**UPDATES, "c": broken}, WEIGHTS)
    assert ([*updates], weights) == (["a", "b"], {"a": 10, "b": 20})
    updates, _ = Loop(strict=False).apply({"c": broken})
    assert updates == {"c": broken}


def test_outside_of_a_round_nothing_is_corrected_and_that_is_told(caplog):
    with Loop(action("quarantine", "c"), strict=False).monitor as monitor:
        assert monitor.corrections().apply(UPDATES, WEIGHTS) == (UPDATES, WEIGHTS)
    assert "belongs inside monitor.round" in caplog.text


def test_a_failure_of_ours_leaves_the_updates_as_they_came(caplog):
    loop = Loop(action("robust_aggregator", rule="median"), strict=False)
    odd = {**UPDATES, "d": {"other": np.ones(7)}}
    assert loop.apply(odd, start=UPDATES["a"])[0] == odd
    assert "training goes on" in caplog.text
