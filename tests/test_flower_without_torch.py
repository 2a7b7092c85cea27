# SPDX-License-Identifier: Apache-2.0
"""Flower apps of NumPy, scikit-learn or XGBoost: watched where torch is not installed, and not made to import it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedvitals.kernels import sums
from fedvitals.probes import numpy_updates
from fedvitals.probes.presets import preset
from fedvitals.probes.updates import Updates, measured
from flower_without_torch import BROKEN, COPY, NODES, ROUNDS, SCALED

PROGRAM = Path(__file__).with_name("flower_without_torch.py")
FINITE = NODES - 1  # clients, without the one that sends NaN


def run(store, mode):
    words = [sys.executable, str(PROGRAM), str(store), mode]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same federation where torch cannot be imported, and where it can; and what the first wrote to its log."""
    folder = tmp_path_factory.mktemp("torch")
    absent, log = run(folder / "absent.db", "absent")
    return absent, run(folder / "present.db", "present")[0], log


def test_an_app_without_torch_is_watched_and_its_ill_clients_are_found(runs):
    absent, _, log = runs
    assert absent["torch"] is False
    assert absent["versions"] == ["fedvitals", "numpy", "python"]
    assert len(absent["clients"]) == NODES
    found = {(issue, node) for issue, node in absent["findings"]}
    assert {("NAN_UPDATE", BROKEN), ("DUPLICATE_UPDATE", COPY)} <= found
    assert SCALED in {node for _, node in found}
    assert {node for _, node in found} <= {BROKEN, SCALED, COPY, str(int(COPY) + 1), None}
    assert ["monitor.error"] not in absent["events"]
    assert ["updates.numpy"] in absent["events"]
    assert log.count("pip install 'fedvitals[torch]'") == 1


def test_numpy_measures_what_torch_measures(runs):
    absent, present, _ = runs
    assert present["torch"] is True
    for kind, keys in (("metrics", 3), ("layers", 4)):
        by_numpy, by_torch = ({tuple(row[:keys]): row[keys:] for row in found[kind]} for found in (absent, present))
        assert by_numpy.keys() == by_torch.keys()
        for key, values in by_torch.items():
            wanted, got = (np.array([np.nan if v is None else v for v in own]) for own in (values, by_numpy[key]))
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=str(key))
    counted = [row[0] for row in absent["metrics"]]
    assert counted.count("update.norm") == NODES * ROUNDS
    assert counted.count("update.cosine_mean") == FINITE * ROUNDS
    assert counted.count("update.cosine_previous") == FINITE * (ROUNDS - 1)
    assert ["updates.numpy"] not in present["events"]


def test_the_client_mod_does_not_import_torch_where_the_app_does_not(tmp_path):
    assert run(tmp_path / "none.db", "unused")[0] == {"torch": False}


def test_nine_sums_are_those_of_the_kernel():
    drawn = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    drawn[0, 0], drawn[1, 1], drawn[2, 2], drawn[3, 3] = np.nan, np.inf, -np.inf, 0
    arrays = [drawn, np.zeros(3, np.float32), np.full(2, np.nan, np.float32), np.zeros((0, 2), np.float32)]
    wanted = np.asarray(sums([torch.from_numpy(array) for array in arrays]))
    np.testing.assert_allclose(numpy_updates.sums(arrays), wanted, rtol=1e-6)


@pytest.mark.parametrize("memory", [1 << 20, 0], ids=["exact", "no memory"])
def test_updates_of_several_rounds_have_the_metrics_of_torch(memory):
    stream = np.random.default_rng(1)
    shapes = [(4, 3), (3,)]
    ours, theirs = numpy_updates.ArrayUpdates(brief=False, memory=memory), Updates(memory=memory)
    for _ in range(3):
        sent = {f"c{i}": [stream.normal(size=shape).astype(np.float32) for shape in shapes] for i in range(5)}
        sent["c1"] = sent["c0"]
        sent["c2"] = [np.zeros(shape, np.float32) for shape in shapes]
        sent["c3"][0][0, 0] = np.nan
        for node, vector, rows in numpy_updates.measured(sent):
            ours.add(node, vector, rows)
        for node, vector, rows in measured({n: [torch.from_numpy(a) for a in update] for n, update in sent.items()}):
            theirs.add(node, vector, rows)
        for got, wanted in zip(ours.close_round(), theirs.close_round(), strict=True):
            names = wanted.metrics if memory else ("update.norm",)  # sketches estimate the rest, and NumPy has none
            for name in names:
                assert got.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-5, abs=1e-7), name
            if memory:
                assert got.metrics.keys() == wanted.metrics.keys()
                np.testing.assert_allclose(got.alignment, wanted.alignment, rtol=1e-5, atol=1e-6)
    assert (ours.held_bytes > 0) == (memory > 0)


def test_a_preset_is_known_by_its_name_before_torch_is():
    for name in ("light", "standard", "deep"):
        assert numpy_updates.ArrayInstruments(preset(name), 0).preset.name == name
