# SPDX-License-Identifier: Apache-2.0
"""The wheel as a user gets it: built, installed without extras beside nothing but its hard dependencies, and tried."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.thorough


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def hard_dependencies(name: str, names: set[str]) -> set[str]:
    """The distributions that `name` needs without any extra, and what these need."""
    for need in distribution(name).requires or ():
        if "extra ==" not in need and "platform" not in need and "python_version" not in need:
            package = re.split(r"[^\w.-]", need)[0]
            if package not in names:
                names.add(package)
                hard_dependencies(package, names)
    return names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def minimal(tmp_path_factory, wheel) -> Path:
    """An environment with the wheel and its hard dependencies only; these are linked, so no network is needed."""
    folder = tmp_path_factory.mktemp("minimal")
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    installed = run(*pip, folder=folder)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    for name in hard_dependencies("fedvitals", set()):
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(distribution(name).locate_file(top))).resolve())
    return folder


def test_wheel_holds_the_package_and_its_type_mark(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "fedvitals/py.typed" in names
    sources = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*.py")}
    assert sources <= set(names)
    assert not [name for name in names if name.startswith(("tests", "docs", "scripts"))]


def test_minimal_install_has_no_extra(minimal):
    result = run(minimal / "env/bin/python", "-c", "import torch", folder=minimal)
    assert "No module named 'torch'" in result.stderr


def test_minimal_install_imports_and_shows_help(minimal):
    code = "import fedvitals; print(fedvitals.__version__, fedvitals.__file__)"
    imported = run(minimal / "env/bin/python", "-W", "error", "-c", code, folder=minimal)
    assert imported.returncode == 0, imported.stderr
    assert str(minimal) in imported.stdout
    shown = run(minimal / "env/bin/fedvitals", "--help", folder=minimal)
    assert shown.returncode == 0, shown.stderr
    assert "demo" in shown.stdout


def test_missing_extra_is_answered_with_the_exact_install_line(minimal):
    result = run(minimal / "env/bin/fedvitals", "demo", folder=minimal)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "pip install 'fedvitals[lab]'" in result.stderr
    assert "Traceback" not in result.stderr
