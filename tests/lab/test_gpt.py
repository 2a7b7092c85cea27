# SPDX-License-Identifier: Apache-2.0
"""The GPT: it never looks ahead, engines agree on it, and it is pretrained once."""

import pytest
import torch

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.data.datasets import load
from fedvitals.lab.data.text import Text
from fedvitals.lab.models import catalog
from fedvitals.lab.models.gpt import GPT, Pretraining
from fedvitals.lab.streams import stream


@pytest.fixture
def text(tmp_path):
    for name in ("alpha", "beta"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_bytes(f"{name} = 1\n".encode() * 200)
    (tmp_path / "open.py").write_bytes(b"alpha = beta\n" * 300)
    return Text(folder=str(tmp_path), steps=8)


SMALL = GPT(width=16, heads=2, layers=2)


def test_default_has_0_39_million_weights():
    module = GPT().build((64,), 256, stream(0, "model"), 256, per_step=True)
    assert sum(p.numel() for p in module.parameters()) == 391_008


def test_an_answer_depends_on_no_later_token():
    module = SMALL.build((8,), 256, stream(0, "model"), 256, per_step=True)
    x = torch.randint(256, (1, 8), generator=stream(1, "x"))
    other = x.clone()
    other[0, 5] = (x[0, 5] + 1) % 256
    same = (module(x) == module(other)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_engines_agree(text):
    e = lab.Experiment(
        dataset=text,
        model=SMALL,
        partition="group_per_client",
        clients=2,
        rounds=2,
        local=lab.Local(iterations=4, optimizer=lab.adam(0.01)),
    )
    one = lab.run(e, engine="sequential")
    for engine in ("reuse", "stacked"):
        torch.testing.assert_close(lab.run(e, engine=engine, workers=1).state, one.state, rtol=2e-3, atol=2e-4)


def test_pretraining_learns_and_is_done_once(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data, model = load(text), GPT(width=16, heads=2, layers=1, pretraining=Pretraining(steps=60, batch=8))
    first = catalog.build(model, data, stream(1, "model"))
    batch = data.public
    loss = torch.nn.functional.cross_entropy(first(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    assert loss.item() < 4.5  # untrained: log 256 = 5.5
    monkeypatch.setattr("fedvitals.lab.models.gpt._train", lambda *_: pytest.fail("trained again"))
    again = catalog.build(model, data, stream(2, "model"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_what_it_cannot_do_is_refused(text):
    with pytest.raises(ConfigError, match="predicts tokens"):
        lab.run(lab.Experiment(dataset="digits", model="gpt"))
    data = lab.synthetic(targets="tokens", sequence=6, vocabulary=8, samples=200)
    with pytest.raises(ConfigError, match="no public text"):
        lab.run(lab.Experiment(dataset=data, model=GPT(width=8, heads=1, pretraining=Pretraining())))
    with pytest.raises(ConfigError, match="multiple of its 4 heads"):
        GPT(width=10)
