# SPDX-License-Identifier: Apache-2.0
"""A clone may lie anywhere: in a folder called fedvitals, below a folder with a space in its name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

HELD = (
    "src",
    "tests",
    "docs",
    "scripts",
    "examples",
    "studies",
    ".ci",
    "pyproject.toml",
    "constraints.txt",
    "conftest.py",
)
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.db", "*.db-*", "*.db.d", ".*_cache", ".hypothesis")
# Hooks, paths and scripts.
TESTS = (
    "probes/test_hooks.py",
    "project/test_house.py",
    "store/test_files.py",
    "project/test_examples.py",
)
pytestmark = pytest.mark.thorough


@pytest.fixture
def clone(tmp_path) -> Path:
    """A copy of the repository, with the environment of this interpreter in place of one of its own."""
    if not (ROOT / "scripts").is_dir():
        pytest.skip("a source distribution has no scripts")
    folder = tmp_path / "a b" / "fedvitals"
    folder.mkdir(parents=True)
    for path in [*(ROOT / name for name in HELD), *ROOT.glob("*.md"), ROOT / "LICENSE"]:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=LEFT_OUT)
        elif path.exists():
            shutil.copy2(path, folder)
    environment = folder / ".venv"
    environment.mkdir()
    prefix = Path(sys.prefix)
    for path in (Path(sys.executable).parent, prefix / "lib", prefix / "pyvenv.cfg"):
        if path.exists():
            (environment / path.name).symlink_to(path)
    stamp = run(
        folder, "sh", "-c", "pwd -P; cat pyproject.toml studies/pyproject.toml constraints.txt | cksum"
    )  # as in scripts/env
    (environment / ".ready-test").write_text(stamp.stdout, encoding="utf-8")
    return folder


def run(clone: Path, *command: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with the code of the clone, in the clone or in another folder."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    settings |= {
        "PYTHONPATH": f"{clone}/src:{clone}/studies/src",
        "PIP_PYTHON": "/nowhere",
    }  # nothing is installed from here
    done = subprocess.run(
        command, cwd=folder or clone, env=settings, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_tests_of_hooks_paths_and_scripts_pass(clone):
    """By the command of the README, which finds the environment ready."""
    loaded = run(clone, clone / ".venv/bin/python", "-c", "import fedvitals; print(fedvitals.__file__)")
    assert Path(loaded.stdout.strip()) == clone / "src/fedvitals/__init__.py"
    tests = [f"tests/{name}" for name in TESTS]
    command = [clone / "scripts/test", "--fast", "-n", "0", "-p", "no:cacheprovider", *tests]
    done = run(clone, *command, folder=clone.parent)
    assert " passed" in done.stdout.splitlines()[-1]


def test_pages_and_the_programs_of_the_environment_are_found(clone):
    run(clone, clone / "scripts/docs", "--check", folder=clone.parent)
    if (clone / ".venv/bin/fedvitals").exists():
        shown = run(clone, clone / "scripts/demo", "--help", folder=clone.parent)
        assert "Usage: fedvitals demo" in shown.stdout
