# SPDX-License-Identifier: Apache-2.0
"""scripts/shape: every figure checked on a small invented tree, and a run on this repository."""

import json
import subprocess
import sys

import pytest

from support.paths import ROOT

FILES = {
    "src/fedvitals/__init__.py": '"""The package."""\n\nfrom fedvitals.records import Row\n',
    "src/fedvitals/records.py": '''\
"""Records.

Three lines with text, the blank one does not count.
"""

# a comment
import os  # a comment after code


class Row:
    """A row."""

    told: int = 0  # a field
    text = """
# no comment, but a line of a string
"""


def found(given, *, round_index):
    """Return nothing."""
    one = [said for said in given]
    one += "a" "b"
    with open(os.devnull) as made_up, open(os.devnull) as MADE:
        pass
    return sorted(one, key=lambda told_: told_)


def names(self, asked, found_clients):
    try:
        seen = (told := 1)
    except ValueError as _told:
        raise
    match asked:
        case {"a": [*found], **said}:
            pass
''',
    "src/fedvitals/store/__init__.py": "",
    "src/fedvitals/store/read/rounds.py": 'SQL = "SELECT id FROM run"\n',
    "src/fedvitals/views/bench.py": "from fedvitals.store.read import rounds\n",
    "src/fedvitals/views/bench_lab.py": '''\
"""SELECT in a docstring is no statement."""

from typing import TYPE_CHECKING

from fedvitals.views import bench_ui

if TYPE_CHECKING:
    from fedvitals.views.chart import Chart


def rows(ask, table, select):
    """SELECT id FROM run"""
    ask("SELECT id FROM run "
        # a comment between two pieces
        "WHERE id = ?")
    ask(f"UPDATE {table} SET id = 1")
    ask(f"{select} WHERE run IN (1)")
    ask("ready when (SELECT 1)")
    ask("WHERE id = ?")
    print('query "SELECT 1"', "UPDATE", "DELETE", "NAN_UPDATE", "SELECTED")
''',
    "src/fedvitals/views/bench_ui.py": "from . import chart\nfrom .bench_lab import rows\n",
    "src/fedvitals/views/chart.py": """\
class Row: ...


class Chart:
    def later(self):
        import fedvitals.views.bench_ui
""",
    "src/fedvitals/views/benchmark.py": "",
    "src/fedvitals/sinks/alerts/outbox.py": """\
SQL = "CREATE TABLE IF NOT EXISTS delivery (id)"
NEW = "INSERT OR IGNORE INTO delivery (id) "
""",
    "src/fedvitals/hosts/flower/site/sitecustomize.py": "",
    "src/fedvitals/hosts/flower/site/more/deep.py": "",
    "src/fedvitals/diagnosis/corrections/path.py": "import fedvitals.diagnosis.utils\n",
    "src/fedvitals/diagnosis/utils.py": "path = 1\n",
    "src/fedvitals/diagnosis/a/b/low.py": "",
    "src/fedvitals/__pycache__/left.py": "syntax error(",
    "studies/src/fedvitals_studies/bench/run.py": """\
from fedvitals import Row
from fedvitals.views import chart
SQL = "PRAGMA user_version"
""",
    "studies/src/fedvitals_studies/bench/letter.py": "class Row: ...\n",
    "tests/test_lab.py": "def test_one(tmp_path, one):\n    pass\n",
    "tests/lab_data.py": "",
    "tests/test_lab_runs.py": 'SQL = "SELECT 1"\n',
    "tests/views/test_chart.py": "",
    "studies/tests/test_run.py": "",
    "pyproject.toml": '[[tool.importlinter.contracts]]\nignore_imports = ["a -> b"]\n',
}  # fmt: skip


def shape(*arguments):
    command = [sys.executable, str(ROOT / "scripts" / "shape"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    for path, text in FILES.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def figures(tree):
    process = shape(tree, "--json")
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_code_and_docstring_lines_by_part(figures):
    sizes = {row["part"]: (row["files"], row["code_lines"], row["docstring_lines"]) for row in figures["parts"]}
    assert sizes == {
        "(root)": (2, 1 + 1 + 5 + 6 + 8, 1 + 3 + 1 + 1),  # the import; an import, the class, two functions
        "diagnosis": (3, 2, 0),
        "hosts": (2, 0, 0),
        "sinks": (1, 2, 0),
        "store": (2, 1, 0),
        "views": (5, 1 + 4 + 8 + 2 + 4, 2),  # bench_lab has 4 lines of imports, and a function
        "studies/bench": (2, 4, 0),
        "tests": (5, 3, 0),
    }
    assert [row["place"] for row in figures["parts"]] == ["wheel"] * 6 + ["studies", "tests"]
    assert figures["wheel_code_lines"] == 21 + 2 + 2 + 1 + 19


def test_prefixes_of_three_files_in_one_folder(figures):
    groups = {(group["folder"], group["prefix"]): group["files"] for group in figures["prefixes"]}
    assert groups == {
        ("src/fedvitals/views", "bench"): ["bench.py", "bench_lab.py", "bench_ui.py"],
        ("tests", "lab"): ["lab_data.py", "test_lab.py", "test_lab_runs.py"],
    }


def test_depth_has_one_more_level_below_hosts(figures):
    assert figures["depth"]["too_deep"] == [
        "src/fedvitals/hosts/flower/site/more/deep.py",
        "src/fedvitals/diagnosis/a/b/low.py",
    ]
    assert figures["depth"]["deepest"][0] == {"path": "src/fedvitals/hosts/flower/site/more/deep.py", "levels": 5}


def test_imports_of_modules_and_parts(figures):
    fans = {row["name"]: (row["fan_in"], row["fan_out"]) for row in figures["modules"]}
    assert fans["fedvitals"] == (1, 1)  # `from fedvitals import Row` of the studies
    assert fans["fedvitals.store.read.rounds"] == (1, 0)
    assert fans["fedvitals.views.bench_ui"] == (2, 2)
    assert fans["fedvitals.views.chart"] == (2, 1)  # not by the import for the type checker
    parts = {row["name"]: (row["fan_in"], row["fan_out"]) for row in figures["parts_imports"]}
    assert parts["views"] == (1, 1)
    assert parts["diagnosis"] == (0, 0)
    assert parts["studies/bench"] == (0, 2)


def test_import_cycles_with_and_without_lazy_imports(figures):
    views = "fedvitals.views."
    assert figures["import_cycles"] == [[views + "bench_lab", views + "bench_ui"]]
    assert figures["import_cycles_with_lazy_imports"] == [[views + "bench_lab", views + "bench_ui", views + "chart"]]


def test_sql_outside_the_store(figures):
    views = "src/fedvitals/views/bench_lab.py"
    assert figures["sql"] == {
        "counted": {views: [13, 16, 17, 18]},
        "allowed": {"src/fedvitals/sinks/alerts/outbox.py": [1, 2]},
        "studies": {"studies/src/fedvitals_studies/bench/run.py": [3]},
        "clauses": {views: [19]},
    }


def test_vague_names_of_every_kind(figures):
    vague = {(entry["kind"], entry["name"], entry["where"].rpartition("/")[2]) for entry in figures["vague_names"]}
    assert vague == {
        ("module", "path", "path.py:1"),
        ("module", "chart", "chart.py:1"),
        ("module", "letter", "letter.py:1"),
        ("module", "chart", "test_chart.py:1"),
        ("class", "Chart", "chart.py:4"),
        ("function", "found", "records.py:19"),
        ("parameter", "given", "records.py:19"),
        ("parameter", "told_", "records.py:25"),
        ("parameter", "one", "test_lab.py:1"),
        ("field", "told", "records.py:13"),
        ("variable", "one", "records.py:21"),
        ("variable", "said", "records.py:21"),
        ("variable", "one", "records.py:22"),
        ("variable", "MADE", "records.py:23"),
        ("variable", "told", "records.py:30"),
        ("variable", "_told", "records.py:31"),
        ("variable", "found", "records.py:34"),
        ("variable", "said", "records.py:34"),
    }
    bound = {row["kind"]: (row["bindings"], row["vague"]) for row in figures["names"] if row["place"] == "wheel"}
    assert bound == {
        "module": (14, 2),
        "class": (3, 1),
        "function": (4, 1),
        "parameter": (2 + 1 + 2 + 3, 2),  # `self` is none
        "field": (1, 1),
        "variable": (11 + 1 + 2 + 1, 8),
    }


def test_class_names_of_several_modules(figures):
    assert figures["homonyms"] == {
        "Row": [
            "src/fedvitals/records.py:10",
            "src/fedvitals/views/chart.py:1",
            "studies/src/fedvitals_studies/bench/letter.py:1",
        ]
    }


def test_bars_met_and_missed(figures, tree):
    bars = {bar["what"]: (bar["now"], bar["bar"], bar["met"]) for bar in figures["bars"]}
    assert bars == {
        "code lines in the wheel": (45, 54_000, True),
        "files that share a prefix, wheel and studies": (3, 0, False),
        "files that share a prefix, tests": (3, 0, False),
        "files that lie too deep": (2, 0, False),
        "import cycles": (1, 0, False),
        "exceptions of import-linter's contracts": (1, 0, False),
        "SQL literals outside store/": (4, 0, False),
        "banned module names": (1, 0, False),
        "vague modules, classes, functions, parameters: wheel and studies": (7, 0, False),
        "vague modules, classes, functions, parameters: tests": (2, 0, False),
        "vague share of all bindings, wheel and studies, %": (32.66, 3.0, False),  # 16 of 49
    }
    assert figures["banned_modules"] == ["src/fedvitals/diagnosis/utils.py"]
    assert shape(tree, "--check").returncode == 1


def test_a_tree_that_meets_all_bars_passes_the_check(tmp_path):
    (tmp_path / "src/fedvitals").mkdir(parents=True)
    (tmp_path / "src/fedvitals/records.py").write_text("class Row: ...\n", encoding="utf-8")
    process = shape(tmp_path, "--check")
    assert process.returncode == 0, process.stdout
    assert "missed" not in process.stdout


def test_a_folder_without_sources_is_an_error(tmp_path):
    process = shape(tmp_path)
    assert process.returncode == 2
    assert "has no Python files below src/fedvitals" in process.stderr


def test_names_are_listed_when_asked_for(tree):
    assert "src/fedvitals/records.py:19" not in shape(tree).stdout
    listed = shape(tree, "--names").stdout
    assert ["function", "found", "src/fedvitals/records.py:19"] in [line.split() for line in listed.splitlines()]
    assert "src/fedvitals/records.py:22" not in listed
    assert "src/fedvitals/records.py:22" in shape(tree, "--bindings").stdout


@pytest.mark.thorough
def test_this_repository_is_measured():
    process = shape()
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[-1] == "hops: see docs/architecture.md (traced by tests/project/test_architecture.py)"
    (cycles,) = (line.split() for line in lines if line.startswith("  import cycles "))
    assert cycles == ["import", "cycles", "0", "0", "met"]
    assert any(line.startswith("  store ") for line in lines)
