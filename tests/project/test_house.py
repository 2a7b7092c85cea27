# SPDX-License-Identifier: Apache-2.0
"""What the project promises as a whole: light imports, generated pages, house rules, extras, the scripts."""

import os
import pkgutil
import re
import subprocess
import sys
import tomllib

import pytest

import fedvitals
from fedvitals.errors import FedvitalsError, MissingExtraError
from support.paths import ROOT

PACKAGE = ROOT / "src" / "fedvitals"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
WITHOUT_TORCH = (
    "records", "protocols", "stats", "catalog", "schedule", "errors", "scope", "store", "store.read", "store.upkeep",
    "transport", "transport.wire", "sinks", "sinks.alerts", "sinks.otel", "sinks.prometheus", "cli",
    "loop_tape", "monitor",
    "probes.results", "probes.presets", "probes.cohort", "probes.numpy_updates", "probes.backends",
    "hosts.otlp", "hosts.flower", "hosts.flower.client_mod", "hosts.flower.attach", "hosts.flower.server_rounds",
    "hosts.flower.strategy", "hosts.flower.legacy", "hosts.flower.unmodified", "hosts.flower.tape.server",
)  # fmt: skip

LIGHT = """
import sys
before = set(sys.modules)
import fedvitals
dir(fedvitals)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - sys.stdlib_module_names - {"fedvitals"}))
"""

NO_TORCH = """
import importlib, sys, traceback

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Blocker())
for module in sys.argv[1:]:
    for loaded in [name for name in sys.modules if name.partition(".")[0] == "fedvitals"]:
        del sys.modules[loaded]  # each as if it were the first: what another has loaded would hide a circle of imports
    try:
        importlib.import_module(module)
    except Exception:
        print(module)
        traceback.print_exc()
"""

NO_TRITON = """
import sys, traceback

ASKED = []

class Absent:  # torch asks for Triton by itself, when an optimiser is made: what counts is who of us does
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            modules = [f.f_globals["__name__"] for f, _ in traceback.walk_stack(sys._getframe(1))]
            ASKED.append(next(module for module in modules if "importlib" not in module))
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Absent())
import fedvitals as fv
from fedvitals import lab
from fedvitals.cli.main import main
from fedvitals.testing import MemorySink

try:
    main(["--help"])
except SystemExit:
    pass
assert not ASKED, ASKED
experiment = lab.Experiment(dataset="digits", model="cnn", clients=3, rounds=1, local=lab.Local(iterations=2))
for engine in ("sequential", "stacked"):
    with fv.Monitor(None, sinks=[MemorySink()], probes="deep", strict=True) as monitor:
        lab.run(experiment, monitor, engine=engine, workers=1)
for module in ASKED:
    assert module.partition(".")[0] != "fedvitals", module
kernels = [f"kernels.cuda.{name}" for name in ("statistics", "sketch", "stacked_conv", "stacked_optimizer")]
for name in (*kernels, "lab.stacked.cuda"):
    assert f"fedvitals.{name}" not in sys.modules, name
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def modules() -> list[str]:
    """Every module that must load without torch, found on disk, so that a new file is covered at once."""
    found = []
    for name in WITHOUT_TORCH:
        found.append(f"fedvitals.{name}")
        folder = PACKAGE.joinpath(*name.split("."))
        if folder.is_dir() and name != "hosts.flower":  # of Flower's side, what apps need: tapes are another extra
            found += [f"fedvitals.{name}.{module.name}" for module in pkgutil.iter_modules([str(folder)])]
    return found


def test_import_fedvitals_loads_nothing_but_the_standard_library():
    result = python(LIGHT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


@pytest.mark.thorough
def test_modules_load_without_torch():
    result = python(NO_TORCH, *modules())
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [], result.stderr


def test_torch_blocker_blocks():
    """The test above can fail."""
    result = python(NO_TORCH, "fedvitals.records", "torch")
    assert result.stdout.split() == ["torch"]
    assert "torch was imported" in result.stderr


@pytest.mark.thorough
def test_nothing_of_ours_wants_triton_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = python(NO_TRITON)
    assert result.returncode == 0, result.stderr


def test_unknown_name_is_answered_with_what_exists():
    with pytest.raises(AttributeError, match="no attribute 'Monitr'") as caught:
        _ = fedvitals.Monitr
    for name in fedvitals.__all__:
        assert name == "__version__" or name in str(caught.value)


def test_missing_extra_is_answered_with_the_install_line():
    error = MissingExtraError("psutil", "system", "Reading memory")
    assert isinstance(error, ImportError)
    assert isinstance(error, FedvitalsError)
    assert str(error).endswith("pip install 'fedvitals[system]'")


def test_install_lines_in_the_source_name_extras_that_exist():
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"fedvitals\[(\w[\w,]*)\]", text)
        named += re.findall(r"MissingExtraError\(\s*\"[\w.-]+\",\s*\"(\w+)\"", text)
        for extra in ",".join(named).split(",") if named else ():
            assert extra in EXTRAS, f"{path}: no extra '{extra}' in pyproject.toml"


def test_all_holds_every_extra():
    (everything,) = EXTRAS["all"]
    named = re.fullmatch(r"fedvitals\[(.*)\]", everything)
    assert named is not None
    assert sorted(named[1].split(",")) == sorted(set(EXTRAS) - {"all"})


def test_constraints_pin_every_development_dependency():
    pins = {
        re.split(r"==", line)[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    wanted = [*PROJECT["build-system"]["requires"], *PROJECT["dependency-groups"]["dev"]]
    wanted += [*PROJECT["project"]["dependencies"], *EXTRAS["torch"], *EXTRAS["kernel"], *EXTRAS["system"]]
    wanted += [need for need in EXTRAS["lab"] if not need.startswith("fedvitals")]
    assert {re.split(r"[^\w-]", need)[0].lower() for need in wanted} <= pins


def test_metrics_page_is_up_to_date():
    from documentation.pages import metrics_page

    page = ROOT / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == metrics_page(), "write it again with scripts/docs"


def test_schema_page_is_up_to_date():
    from documentation.pages import schema_page

    page = ROOT / "docs" / "schema.md"
    assert page.read_text(encoding="utf-8") == schema_page(), "write it again with scripts/docs"


def test_architecture_page_shows_the_layers_of_the_contract():
    (contract,) = PROJECT["tool"]["importlinter"]["contracts"]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert "\n".join(f"    {layer}" for layer in contract["layers"]) in page
    assert contract["ignore_imports"] == []


def test_architecture_page_names_every_part_and_none_that_does_not_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w*]+(?:/[\w*]+)*(?:/|\.py|\.toml))`", page))
    package = ROOT / "src" / "fedvitals"
    modules = {child.name for child in package.glob("*.py") if child.stem != "__init__"}
    folders = {
        f"{child.parent.name}/" for child in [*package.glob("*/__init__.py"), *package.glob("hosts/*/__init__.py")]
    }
    assert (modules | folders) - named == set()
    assert [
        name for name in named - {"fedvitals/part/group/file.py"} if not [*package.rglob(name), *ROOT.glob(name)]
    ] == []


def rules(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "rules"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_house_rules_are_kept():
    result = rules()
    assert result.returncode == 0, result.stdout


SPDX = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("src/fedvitals/long.py", SPDX + "x = 1\n" * 500, "long.py:501: the file has 501 lines"),
        ("tests/test_long.py", SPDX + "def f():\n" + "    x = 1\n" * 60, "test_long.py:2: f() has 61 lines"),
        ("src/fedvitals/a/b/c/deep.py", SPDX, "deep.py:1: lies too deep"),
        ("src/fedvitals/a/b/c/d/page.css", "/* " + SPDX, "page.css:1: lies too deep"),
        ("src/fedvitals/a/page.css", "a {}", "page.css:1: the first line must have"),
        ("src/fedvitals/a/long.js", "//" + SPDX + "1;\n" * 500, "long.js:501: the file has 501 lines"),
        ("src/fedvitals/a/page.js", "//" + SPDX + "x.innerHTML = y;", "page.js:2: makes markup or code of a string"),
        ("src/fedvitals/a/page.js", "//" + SPDX + "eval(x);", "page.js:2: makes markup or code of a string"),
        ("src/fedvitals/a/utils.py", SPDX, "utils.py:1: 'utils' says nothing"),
        ("src/fedvitals/core/name.py", SPDX, "name.py:1: 'core' says nothing"),
        ("src/fedvitals/bare.py", "", "bare.py:1: the first line must have"),
        ("tests/test_later.py", SPDX + "\n# TO" + "DO: more\n", "test_later.py:3: do it"),
    ],
)
def test_broken_rule_is_told_with_its_place(tmp_path, path, text, message):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    result = rules(str(tmp_path))
    assert result.returncode == 1
    assert message in result.stdout
    assert len(result.stdout.splitlines()) == 1


def test_allowed_files_break_no_rule(tmp_path):
    file = tmp_path / "src/fedvitals/dashboard/static/page.css"
    file.parent.mkdir(parents=True)
    file.write_text("/* " + SPDX.strip() + " */", encoding="utf-8")
    file.with_name("picture.svg").write_text("", encoding="utf-8")
    assert rules(str(tmp_path)).returncode == 0


def test_commands_of_the_readme_exist_and_run():
    named = set(re.findall(r"scripts/(\w+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"demo", "test"} <= named
    for name in named | {"check", "docs", "env", "rules", "shape"}:
        assert os.access(ROOT / "scripts" / name, os.X_OK), f"scripts/{name} cannot be run"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
