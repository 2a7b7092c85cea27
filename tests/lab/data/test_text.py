# SPDX-License-Identifier: Apache-2.0
"""Text, tables and series: what a sample is, what belongs together, and nothing of the test is trained on."""

import json

import numpy as np
import pytest
import torch

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.data.datasets import load
from fedvitals.lab.data.tabular import Tabular, TimeSeries
from fedvitals.lab.data.text import Text


@pytest.fixture
def folder(tmp_path):
    for name in ("alpha", "beta"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_bytes(f"{name} = 1\n".encode() * 200)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "a.py").write_bytes(b"x\n")
    (tmp_path / "open.py").write_bytes(b"public text\n" * 100)
    return tmp_path


def test_a_target_is_the_byte_that_follows(folder):
    data = load(Text(folder=str(folder), steps=8))
    assert data.targets == "tokens"
    assert data.outputs == (256,)
    assert data.shape == (8,)
    assert bytes(data.x[0].tolist()) == b"alpha = "
    assert bytes(data.y[0].tolist()) == b"lpha = 1"
    assert torch.equal(data.x[:, 1:], data.y[:, :-1])
    assert torch.equal(data.test_x[:, 1:], data.test_y[:, :-1])


def test_packages_are_groups_and_files_beside_them_are_public(folder):
    data = load(Text(folder=str(folder), steps=8))
    assert data.groups.unique().tolist() == [0, 1]  # the third is too small
    assert bytes(data.public[0].tolist()) == b"public te"
    shards = lab.Site.of(
        lab.Experiment(
            dataset=Text(folder=str(folder), steps=8),
            partition="group_per_client",
            clients=2,
            model=lab.gpt(width=8, heads=1, layers=1),
        )
    ).shards
    for shard in shards.values():
        assert len(data.groups[torch.cat([shard.train, shard.test])].unique()) == 1


def test_a_folder_without_packages_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No subfolder"):
        load(Text(folder=str(tmp_path)))
    with pytest.raises(ConfigError, match="no folder"):
        load(Text(folder=str(tmp_path / "none")))


def test_the_standard_library_is_the_default():
    data = load(Text(packages=3))
    assert len(data.groups.unique()) == 3
    assert data.public is not None
    assert b"import" in bytes(data.x.flatten().tolist())


@pytest.mark.parametrize("name", ["diabetes", "linnerud", "breast_cancer", "wine", "iris"])
def test_tables_are_scaled(name):
    data = load(Tabular(name))
    x = torch.cat([data.x, data.test_x])
    assert float(x.mean(0).abs().max()) < 1e-4
    assert float((x.std(0, correction=0) - 1).abs().max()) < 1e-4
    assert data.targets == ("numbers" if name in ("diabetes", "linnerud") else "classes")


def test_windows_of_a_series_do_not_overlap_with_its_test():
    data = load(TimeSeries(series=2, length=60, steps=5))
    seen = {json.dumps(np.round(row, 6).tolist()) for row in data.x[:, :, 0].numpy()}
    whole = torch.cat([data.x[:, :, 0], data.y], 1)
    tests = torch.cat([data.test_x[:, :, 0], data.test_y], 1)
    values = set(tests.flatten().tolist())
    assert not values & set(whole.flatten().tolist())
    assert len(seen) == len(data.x)
