# SPDX-License-Identifier: Apache-2.0
"""The wheels as a user gets them: built, checked, and installed beside nothing but the hard dependencies.

That of fedvitals holds no study, no test and no path that leads out of it; that of the studies holds their data.
"""

import ast
import os
import re
import subprocess
import sys
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from support.paths import ROOT
from support.verbs import verbs_of

pytestmark = pytest.mark.thorough

STUDY_DATA = {
    *(f"faultbank/banks/{bank}.toml" for bank in ("held_out", "held_out_large", "quick", "tune")),
    "flower/digits_app/pyproject.toml",
    "reproduce/claims.toml",
}
HOMES = ("/home/", "/root/", "/work/", "/Users/", "/tmp/", f"{ROOT}/")  # of people and machines


def run(*command: str | Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
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


def build(source: Path, folder: Path) -> Path:
    """Build the wheel of a distribution, without a network."""
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, folder=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def studies_wheel(tmp_path_factory) -> Path:
    return build(ROOT / "studies", tmp_path_factory.mktemp("studies"))


def steps_up(node: ast.expr) -> int | None:
    """How many folders above the file an expression such as `Path(__file__).resolve().parents[1]` leads."""
    match node:
        case ast.Name(id="__file__") | ast.Attribute(attr="__file__"):
            return 0
        case ast.Attribute(value=inner, attr="parent") | ast.Call(func=ast.Attribute(attr="dirname"), args=[inner]):
            return None if (steps := steps_up(inner)) is None else steps + 1
        case (
            ast.Call(func=ast.Name(id="Path"), args=[inner])
            | ast.Call(func=ast.Attribute(attr="abspath" | "realpath"), args=[inner])
            | ast.Call(func=ast.Attribute(value=inner), args=[])
        ):
            return steps_up(inner)
        case ast.Subscript(value=ast.Attribute(value=inner, attr="parents"), slice=index):
            highest = index.value if isinstance(index, ast.Constant) else sys.maxsize
            return None if (steps := steps_up(inner)) is None else steps + highest + 1
    return None


def ways_out(path: str, text: str) -> Iterator[str]:
    """What in a module of the wheel leads out of it, each as «path:line: what»."""
    tree = ast.parse(text)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(module.partition(".")[0] in ("fedvitals_studies", "support", "tests", "conftest") for module in modules):
            yield f"{path}:{node.lineno}: imports {modules[0]}"
        if isinstance(node, ast.expr) and (steps_up(node) or 0) > path.count("/"):
            yield f"{path}:{node.lineno}: leads above the package"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            if "fedvitals_studies" in node.value:
                yield f"{path}:{node.lineno}: names the package of the studies"
            if node.value.startswith(HOMES):
                yield f"{path}:{node.lineno}: has the absolute path {node.value}"


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
    linked(packages, hard_dependencies("fedvitals", set()))
    return folder


def linked(packages: Path, names: set[str]) -> None:
    """Link distributions of this environment into another one's packages, where they are not there yet."""
    for name in names:
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution(name).locate_file(top))).resolve())


def test_example_is_shown_without_torch_by_one_line(minimal, tmp_path):
    """As `uvx --from WHEEL fedvitals ui --demo`, with the hard dependencies only: the first page, and its runs."""
    (packages,) = (minimal / "env" / "lib").glob("python*/site-packages")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONUNBUFFERED"] = "1"
    command = [minimal / "env/bin/python", "-m", "fedvitals", "ui", "--demo", "--no-open", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = re.search(r"http://[^/]+", process.stdout.readline())[0]
            with urllib.request.urlopen(f"{address}/") as page, urllib.request.urlopen(f"{address}/api/runs") as runs:
                assert b"<html" in page.read()
                assert b"hospitals" in runs.read()
        finally:
            process.terminate()
    assert not [name for name in ("torch", "fastapi", "starlette", "pydantic") if (packages / name).exists()]


def test_wheel_holds_the_package_and_its_type_mark(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "fedvitals/py.typed" in names
    sources = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*.py")}
    assert sources <= set(names)
    assert not [name for name in names if not name.startswith(("fedvitals/", "fedvitals-"))]
    assert not [name for name in names if {"studies", "tests", "test", "conftest.py"} & {*name.split("/")}]


def test_wheel_holds_no_path_that_leads_out_of_it(wheel):
    archive = zipfile.ZipFile(wheel)
    assert not [name for name in archive.namelist() if name.startswith("/") or ".." in name.split("/")]
    sources = [name for name in archive.namelist() if name.endswith(".py")]
    assert [way for name in sources for way in ways_out(name, archive.read(name).decode())] == []
    texts = [name for name in archive.namelist() if name.endswith((".js", ".css", ".html", ".json", ".yml", ".toml"))]
    assert texts
    for name in texts:
        assert not any(f'"{home}' in archive.read(name).decode() for home in HOMES), name


@pytest.mark.parametrize(
    ("code", "way"),
    [
        ("import fedvitals_studies.bench", "1: imports fedvitals_studies.bench"),
        ("def f():\n    from fedvitals_studies import bench", "2: imports fedvitals_studies"),
        ("from support.paths import ROOT", "1: imports support.paths"),
        ("importlib.import_module('fedvitals_studies')", "1: names the package of the studies"),
        ("x = Path(__file__).resolve().parents[2]", "1: leads above the package"),
        ("x = Path(__file__).parents[n]", "1: leads above the package"),
        ("x = Path(__file__).parent.parent.parent / 'docs'", "1: leads above the package"),
        ("x = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))", "1: leads above the package"),
        ("x = '/home/me/data'", "1: has the absolute path /home/me/data"),
    ],
)
def test_ways_out_are_found(code, way):
    assert list(ways_out("fedvitals/part/module.py", code)) == [f"fedvitals/part/module.py:{way}"]


def test_ways_inside_are_allowed():
    allowed = "'fedvitals_studies measures it.'\nx = Path(__file__).resolve().parents[1]\ny = '/proc/self/stat'"
    assert list(ways_out("fedvitals/part/module.py", allowed)) == []


def test_wheel_of_the_studies_holds_their_code_data_and_verbs(studies_wheel):
    archive = zipfile.ZipFile(studies_wheel)
    names = archive.namelist()
    source = ROOT / "studies" / "src"
    assert {str(path.relative_to(source)) for path in source.rglob("*.py")} <= set(names)
    assert {f"fedvitals_studies/{name}" for name in STUDY_DATA} <= set(names)
    assert not [name for name in names if not name.startswith(("fedvitals_studies/", "fedvitals_studies-"))]
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    verbs = re.findall(r"^(\w+) = ", archive.read(entry_points).decode(), re.MULTILINE)
    assert sorted(verbs) == ["bench", "faultbank", "reproduce"]


def test_studies_add_their_verbs_and_are_named_where_they_are_missing(minimal, studies_wheel, tmp_path):
    program = minimal / "env/bin/fedvitals"
    missing = run(program, "bench", folder=minimal)
    assert missing.returncode == 2
    assert missing.stderr.count("pip install -e studies") == 1
    assert len(missing.stderr.splitlines()) == 1
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", tmp_path, studies_wheel]
    installed = run(*pip, folder=tmp_path)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    without = verbs_of(run(program, "--help", folder=minimal).stdout)
    together = verbs_of(run(program, "--help", folder=minimal, PYTHONPATH=str(tmp_path)).stdout)
    assert together == [*without, "faultbank", "reproduce", "bench"]
    assert run(program, "bench", "--help", folder=minimal, PYTHONPATH=str(tmp_path)).returncode == 0


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
