# SPDX-License-Identifier: Apache-2.0
"""The fault bank on a machine that is lent: packed, run in time, brought home; and processes that die or run late."""

import io
import json
import math
import operator
import os
import tarfile
import time
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedvitals.cli.main import main
from fedvitals.errors import ConfigError
from fedvitals.lab.data import datasets
from fedvitals.lab.data.datasets import Dataset
from fedvitals.lab.data.gtsrb import GTSRB
from fedvitals.lab.data.image_archives import FashionMNIST
from fedvitals.lab.data.small import Synthetic
from fedvitals_studies.faultbank import bundle as faultbank_bundle
from fedvitals_studies.faultbank import pack as faultbank_pack
from fedvitals_studies.faultbank import remote_run
from fedvitals_studies.faultbank.cases import read_bank
from fedvitals_studies.faultbank.comparison import read_other, verdict
from fedvitals_studies.faultbank.examine import sources
from fedvitals_studies.faultbank.intervals import NOTHING, Estimate
from fedvitals_studies.faultbank.pool import refused
from fedvitals_studies.faultbank.run import _at_home
from fedvitals_studies.faultbank.workers import Ended, in_processes
from fedvitals_studies.packs import gpu_sharing, unpacked
from support.conditions import holds_for_each

SMALL = """
name = "small"

[[cases]]
name = "one"
domain = "synthetic"

[cases.experiment]
dataset = {kind = "synthetic", samples = 60, classes = 3, features = 4}
model = {kind = "mlp", hidden = [3]}
local = {iterations = 2}
clients = 4
rounds = 3
seed = 1
faults = [{kind = "sign_flip", nodes = ["c2"], since = 1}]

[[cases]]
name = "impossible"
domain = "synthetic"

[cases.experiment]
dataset = {kind = "synthetic", samples = 60, classes = 3, features = 4}
model = {kind = "mlp", hidden = [3]}
clients = 2
rounds = 3
seed = 2
faults = [{kind = "client_drift", classes = 1}]
"""


@pytest.fixture
def bank(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return path


def away(bank, folder, *more):
    where = ("--work", folder / "work", "--out", folder / "out")
    return remote_run.main([str(each) for each in ("--bank", bank, "--device", "cpu", *where, *more)])


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["faultbank", *map(str, arguments)])
    return end.value.code, *capsys.readouterr()


# -- there and home ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_trained_and_examined_there_and_a_page_of_it_here(bank, tmp_path, capsys):
    assert away(bank, tmp_path, "--workers", 1) == 0  # what the lab refuses is no failure of the machine
    said = capsys.readouterr().out
    assert "synthetic on cpu: 3 runs" in said
    assert "3 of 4 runs done, 3 of them on the CPU, 1 failed" in said
    assert "FAILED small/impossible: fedvitals.errors.ConfigError: 2 clients with 1 classes" in said
    (bundle,) = (tmp_path / "out").iterdir()
    assert bundle.name == "bank-0.tar.gz"
    page = tmp_path / "page"
    code, out, told = call(capsys, "--bank", bank, "--merge", tmp_path / "out", "--out", page, "--json")
    assert code == 1
    assert "small/impossible failed" in told
    facts = json.loads(out)["result"]
    assert facts["counts"]["runs"] == 3
    text = (page / "README.md").read_text(encoding="utf-8")
    assert sources() in text
    assert "trained on cpu by the engine stacked: 3 runs" in text
    assert f"trained and examined elsewhere: cpu, torch {torch.__version__}, 1 processes" in text.replace("\\", "")
    assert "failed, and left out: 1 runs (small/impossible): 2 clients with 1 classes" in text.replace("\\", "")
    assert json.loads((page / "summary.json").read_text(encoding="utf-8"))["trained"] == {"cpu": 3}
    call(capsys, "--bank", bank, "--merge", bundle, "--out", page, "--beside", page)
    text = (page / "README.md").read_text(encoding="utf-8")
    assert "| F1 | " in text
    assert "small: 3 runs, on cpu | small: 3 runs, on cpu" in text


@pytest.mark.thorough
def test_what_earlier_calls_did_is_not_done_again_and_is_told_of(bank, tmp_path, capsys):
    assert away(bank, tmp_path / "a", "--workers", 1, "--sample", 1) == 0
    capsys.readouterr()
    assert away(bank, tmp_path / "b", "--workers", 1, "--have", tmp_path / "a" / "out" / "bank-0.tar.gz") == 0
    said = capsys.readouterr().out
    assert "from earlier calls: 2 runs" in said
    assert "small: 1 pairs to do" in said
    merged = faultbank_bundle.merge(read_bank(bank), [tmp_path / "b" / "out"], tmp_path / "home")
    assert (merged.cases, len(merged.calls), [*merged.failed]) == (3, 2, ["small/impossible"])


def test_no_time_is_no_error_and_nothing_is_half_done(bank, tmp_path, capsys):
    assert away(bank, tmp_path, "--workers", 1, "--minutes", 1e-9) == 0
    assert "0 of 4 runs done" in capsys.readouterr().out
    code, _, told = call(capsys, "--bank", bank, "--merge", tmp_path / "out", "--out", tmp_path / "page")
    assert code == 2
    assert "no finished case" in told


def test_a_bundle_of_another_bank_or_none_at_all_is_refused(bank, tmp_path):
    assert away(bank, tmp_path, "--workers", 1, "--minutes", 1e-9) == 0
    other = tmp_path / "other.toml"
    other.write_text(SMALL.replace("seed = 1", "seed = 9"), encoding="utf-8")
    with pytest.raises(ConfigError, match="of another bank"):
        faultbank_bundle.merge(read_bank(other), [tmp_path / "out"], tmp_path / "home")
    with pytest.raises(ConfigError, match="There is no bank-"):
        faultbank_bundle.merge(read_bank(bank), [tmp_path / "work"], tmp_path / "home")
    with pytest.raises(ConfigError, match="cannot be read as a bundle"):
        faultbank_bundle.merge(read_bank(bank), [bank], tmp_path / "home")


def test_a_bundle_that_is_damaged_or_means_harm_is_refused(bank, tmp_path, monkeypatch):
    assert away(bank, tmp_path, "--workers", 1, "--minutes", 1e-9) == 0
    (good,) = (tmp_path / "out").iterdir()
    content = good.read_bytes()
    damaged = tmp_path / "damaged.tar.gz"
    for bad in (content[: len(content) // 2], content[:40] + bytes(8) + content[48:]):
        damaged.write_bytes(bad)
        with pytest.raises(ConfigError, match="cannot be read as a bundle"):
            faultbank_bundle.merge(read_bank(bank), [damaged], tmp_path / "home")
    evil = tmp_path / "evil.tar.gz"
    with tarfile.open(evil, "w:gz") as archive:
        for name, text in (("../outside", b"x"), (f"{tmp_path}/outside", b"x"), (faultbank_bundle.FACTS, b"[]")):
            about = tarfile.TarInfo(name)
            about.size = len(text)
            archive.addfile(about, io.BytesIO(text))
    with pytest.raises(ConfigError, match="cannot be read as a bundle"):
        faultbank_bundle.merge(read_bank(bank), [evil], tmp_path / "home")
    assert not [*tmp_path.rglob("outside")]
    monkeypatch.setattr(unpacked, "MOST", 100)
    with pytest.raises(ConfigError, match="more than 100 bytes"):
        faultbank_bundle.merge(read_bank(bank), [good], tmp_path / "home")


@pytest.mark.thorough
def test_bundles_are_as_large_as_may_travel_and_no_more_than_may(tmp_path, monkeypatch):
    bank = read_bank("quick")
    for case in bank.cases:
        for path in faultbank_bundle._files(tmp_path, case):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(os.urandom(20_000))
    monkeypatch.setattr(faultbank_bundle, "LARGEST", 600_000)
    files = faultbank_bundle.write(bank, tmp_path, tmp_path / "out", [], {})
    assert 1 < len(files) < 8
    assert holds_for_each(file.stat().st_size < 700_000 for file in files)
    assert faultbank_bundle.merge(bank, files, tmp_path / "home").cases == len(bank.cases)
    monkeypatch.setattr(faultbank_bundle, "LARGEST", 100_000)
    assert len(faultbank_bundle.write(bank, tmp_path, tmp_path / "most", [], {})) == 8


def test_what_went_wrong_there_is_told_apart_from_what_nobody_can_run():
    assert refused("Traceback ...\nfedvitals.errors.ConfigError: too few clients.\n")
    assert not refused("Traceback ...\nRuntimeError: CUDA error: out of luck\n")


# -- the pack ---------------------------------------------------------------------------------------------------------


def test_a_bank_is_packed_with_all_that_it_needs(bank, tmp_path, capsys):
    wheel = tmp_path / "msgspec.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("msgspec/__init__.py", "")
    code, out, _ = call(capsys, "--bank", bank, "--pack", tmp_path / "pack", "--wheel", wheel)
    assert code == 0
    assert "--merge OUT" in out
    inside = tmp_path / "pack" / "code"
    assert read_bank(inside / "bank.toml").digest == read_bank(bank).digest
    assert {"run.py", "fedvitals", "msgspec", "tomli_w"} <= {path.name for path in inside.iterdir()}
    assert json.loads((inside / "manifest.json").read_text(encoding="utf-8"))["entry"] == faultbank_pack.ENTRY


def test_what_was_seen_before_is_done_last_and_small_models_train_on_the_cpu(tmp_path):
    bank = read_bank("attacks")
    longest = remote_run.pairs_of(bank, tmp_path, "mixed")
    seen = {case.name for pair in longest[:3] for case in pair.cases}
    pairs = remote_run.pairs_of(bank, tmp_path, "mixed", seen=seen)
    assert pairs == [*longest[3:], *longest[:3]]
    devices = {type(pair.cases[0].experiment.model).__name__: pair.device for pair in pairs}
    assert devices == {"MLP": "cpu", "CNN": "cuda"}


def test_the_few_samples_that_cases_use_are_the_same_in_the_pack(tmp_path):
    chance = np.random.default_rng(0)

    def images(count, channels, side):
        return torch.from_numpy(chance.integers(0, 256, (count, channels, side, side), dtype=np.uint8))

    y, test_y = torch.arange(9) % 5, torch.arange(4)
    signs = Dataset("gtsrb", images(9, 3, 32), y, images(4, 3, 32), test_y, 100 * y + 7, 43, "")
    clothes = Dataset("fashion_mnist", images(9, 1, 28), y, images(4, 1, 28), test_y, None, 10, "")
    assert len([*faultbank_pack._gtsrb(signs, tmp_path)]) == 2
    assert len([*faultbank_pack._fashion(clothes, tmp_path)]) == 4
    for described, before in ((GTSRB(), signs), (FashionMNIST(), clothes)):
        after = described.find([tmp_path])[1]()
        for name in ("x", "y", "test_x", "test_y", "groups"):
            expected = getattr(before, name)
            if expected is not None:
                np.testing.assert_array_equal(getattr(after, name), expected.numpy())


# -- processes --------------------------------------------------------------------------------------------------------


def test_each_task_has_its_result_and_one_that_fails_says_why():
    found = dict(in_processes(math.sqrt, [4.0, -1.0, 9.0], 1))
    assert (found[4.0], found[9.0]) == (2.0, 3.0)
    assert "ValueError" in found[-1.0].why


@pytest.mark.thorough
def test_a_process_that_dies_is_replaced_and_only_its_task_is_lost():
    assert dict(in_processes(operator.neg, [1, 2, 3], 2)) == {1: -1, 2: -2, 3: -3}
    found = dict(in_processes(os._exit, [3, 4, 5], 2))
    assert [found[code].why for code in (3, 4, 5)] == [
        f"The process that worked on it died (exit code {code})." for code in (3, 4, 5)
    ]
    assert isinstance(found[3], Ended)


@pytest.mark.thorough
def test_when_the_time_is_over_what_is_at_work_is_given_up():
    assert [*in_processes(time.sleep, [3600, 3600, 3600], 2, seconds=0.5)] == []  # an hour, if it were not given up


def test_a_process_with_many_cases_loads_a_data_set_once(monkeypatch):
    described = Synthetic(samples=60)
    assert datasets.load(described) is not datasets.load(described)
    monkeypatch.setattr(datasets, "_remembered", None)
    datasets.remember()
    first = datasets.load(described)
    datasets.remember()
    assert datasets.load(Synthetic(samples=60)) is first
    assert datasets.load(Synthetic(samples=61)) is not first


def test_updates_that_lie_here_are_not_copied():
    updates = {"c0": torch.ones(5).split([2, 3])}
    assert _at_home(updates) is updates


def test_without_the_service_processes_take_turns(monkeypatch):
    monkeypatch.setattr(gpu_sharing, "CONTROL", "no-such-program")
    with gpu_sharing.shared() as together:
        assert not together
    monkeypatch.setattr(gpu_sharing, "CONTROL", "false")  # it is there, and does not work
    monkeypatch.setenv(gpu_sharing.VARIABLES[0], "/of/somebody")
    with gpu_sharing.shared() as together:
        assert not together
        assert [os.environ.get(name) for name in gpu_sharing.VARIABLES] == ["/of/somebody", None]


# -- two sets ---------------------------------------------------------------------------------------------------------


def test_intervals_overlap_or_lie_apart():
    one = Estimate(0.5, 0.4, 0.6, 10)
    assert verdict(one, replace(one, low=0.6, high=0.7)) == "overlap"
    assert verdict(one, replace(one, low=0.61, high=0.7)) == "apart"
    assert verdict(one, NOTHING) == "not known"


def test_what_is_no_summary_is_said(tmp_path):
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is no summary.json"):
        read_other(tmp_path)


# -- wrong use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pack", "x", "--merge", "y"), "give one of them"),
        (("--minutes", "0"), "--minutes"),
        (("--device", "tpu"), "--device"),
        (("--merge", "nothing-here"), "cannot be read as a bundle"),
    ],
)
def test_wrong_use_is_answered(bank, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, _, told = call(capsys, "--bank", bank, *arguments)
    assert code == 2
    assert words in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_before_anything_runs(bank, tmp_path, capsys):
    code, _, told = call(capsys, "--bank", bank, "--device", "cuda", "--out", tmp_path / "page")
    assert code == 2
    assert "'cuda' was asked for" in told
    assert remote_run.main(["--bank", str(bank)]) == 2
    assert "There is no GPU here: PyTorch" in capsys.readouterr().out
