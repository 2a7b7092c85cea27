# SPDX-License-Identifier: Apache-2.0
"""The worked example of a plug-in, installed as a user would and used: its verb, its detector, and a broken variant."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.thorough

EXAMPLE = ROOT / "examples" / "plugin"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")
# Five clients train for two rounds, c3 far less than the others. Prints what was found, and whether all was judged.
TRAINING = """
import sys
import torch
import fedvitals as fv

_, store, *detectors = sys.argv
with fv.Monitor(store, "digits", detectors=detectors) as monitor:
    for number in range(2):
        with monitor.round(number):
            for client in range(5):
                model = torch.nn.Linear(3, 2)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                with monitor.client(f"c{client}", model):
                    for _ in range(2 if client == 3 else 8):
                        optimizer.zero_grad()
                        model(torch.randn(4, 3)).square().mean().backward()
                        optimizer.step()
    found = monitor.findings()
for finding in found:
    if finding.issue == "FEW_STEPS":
        print(finding.where.round, finding.message)
print("not judged:", *found.gaps)
print("imported:", "fedvitals_acme" in sys.modules)
"""


class Environment:
    """A folder that distributions are installed into, beside this interpreter's own environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages = folder / "packages"

    def python(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(self.packages), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.folder, env=settings, capture_output=True, text=True, check=False)

    def fedvitals(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "fedvitals", *arguments)

    def train(self, *detectors: str) -> list[str]:
        done = self.python("-c", TRAINING, "runs.db", *detectors)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


def installed(folder: Path, source: Path) -> Environment:
    """Install a copy of a distribution's source, offline: building leaves files beside it."""
    copy = folder / "source"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    environment = Environment(folder)
    command = [*PIP, *OFFLINE, "--target", environment.packages, copy]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return environment


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Environment:
    return installed(tmp_path_factory.mktemp("example"), EXAMPLE)


def test_detector_finds_the_client_with_few_steps_when_it_is_named(example):
    said = example.train("standard", "acme")
    assert said == [
        "0 c3 trained 2 steps, the median client 8.",
        "1 c3 trained 2 steps, the median client 8.",
        "not judged:",
        "imported: True",
    ]


def test_detector_that_is_not_named_is_not_even_imported(example):
    assert example.train("standard") == ["not judged:", "imported: False"]


def test_verb_appears_and_runs(example):
    shown = example.fedvitals("--help")
    assert "steps      List how many steps each client of a run trained" in shown.stdout
    if not (example.folder / "runs.db").exists():
        example.train("acme")
    listed = example.fedvitals("steps", "digits")
    assert listed.returncode == 0, listed.stderr
    nodes = [line.split()[0] for line in listed.stdout.splitlines()]
    assert nodes == ["c3", "c0", "c1", "c2", "c4"]
    assert example.fedvitals("steps", "other").returncode == 2


def test_broken_variant_is_named_and_left_out(tmp_path):
    source = tmp_path / "broken"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    for module in ("detector.py", "verb.py"):
        path = source / "fedvitals_acme" / module
        path.write_text("import a_package_that_is_missing\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    environment = installed(tmp_path, source)
    shown = environment.fedvitals("--help")
    assert shown.returncode == 0, shown.stderr
    assert "steps      List" not in shown.stdout
    assert "The verb 'steps' of fedvitals-acme cannot be loaded" in " ".join(shown.stdout.split())
    *_, judged, imported = environment.train("standard", "acme")
    assert judged.startswith("not judged: the detector 'acme' failed in round")
    assert imported == "imported: True"  # its package; its detector cannot be
