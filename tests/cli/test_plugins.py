# SPDX-License-Identifier: Apache-2.0
"""Verbs of other distributions on the command line."""

import os
import subprocess
import sys

import pytest

from fedvitals.cli.main import STUDIES, VERBS
from support.plugins import install
from support.verbs import verbs_of

HELLO = """
import click

@click.command()
def command():
    "Greet."
    click.echo("hello from the plug-in")
"""


@pytest.fixture
def fedvitals(tmp_path):
    """Calls `fedvitals` in a process of its own, with the distributions in tmp_path/installed."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path / "installed"), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "fedvitals", *arguments]
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return call


def test_verb_of_a_plugin_appears_and_runs(fedvitals, tmp_path):
    install(tmp_path / "installed", "acme", HELLO, verbs={"hello": "command"})
    shown = fedvitals("--help")
    assert verbs_of(shown.stdout) == [*VERBS, *STUDIES, "hello"]
    assert "Greet." in shown.stdout
    assert "left out" not in shown.stdout
    assert fedvitals("hello").stdout == "hello from the plug-in\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import missing_package", "(ModuleNotFoundError: No module named 'missing_package')"),
        ("raise SystemExit(3)", "(SystemExit: 3)"),
        ("command = print", "is not a click command"),
    ],
)
def test_broken_verb_is_named_and_left_out(fedvitals, tmp_path, code, reason):
    install(tmp_path / "installed", "acme", code, verbs={"hello": "command"})
    shown = fedvitals("--help")
    assert shown.returncode == 0, shown.stderr
    assert verbs_of(shown.stdout) == [*VERBS, *STUDIES]
    left_out = " ".join(shown.stdout.split("Plug-ins left out:")[1].split())
    assert "The verb 'hello' of acme" in left_out
    assert reason in left_out
    called = fedvitals("hello")
    assert called.returncode == 2
    assert called.stdout == ""
    assert reason in called.stderr
    assert len(called.stderr.splitlines()) == 1
    assert fedvitals("query", "--help").returncode == 0


@pytest.mark.parametrize("verb", ["show", "bench"])
def test_plugin_cannot_take_the_name_of_a_verb_of_fedvitals(fedvitals, tmp_path, verb):
    install(tmp_path / "installed", "acme", HELLO, verbs={verb: "command"})
    shown = fedvitals("--help")
    assert verbs_of(shown.stdout) == [*VERBS, *STUDIES]
    assert f"The verb '{verb}' of acme has the name of a verb of fedvitals." in " ".join(shown.stdout.split())
    assert "hello from the plug-in" not in fedvitals(verb, "--help").stdout
    assert "Greet." not in fedvitals(verb, "--help").stdout


def test_unknown_verb_is_answered_with_those_of_plugins_too(fedvitals, tmp_path):
    install(tmp_path / "installed", "acme", HELLO, verbs={"hello": "command"})
    called = fedvitals("helo")
    assert called.returncode == 2
    assert "Did you mean 'hello'?" in called.stderr


def test_a_built_in_verb_looks_for_no_plugin(tmp_path):
    """It starts as quickly as it did before there were any."""
    code = (
        "import sys\nfrom fedvitals.cli.main import app\napp.main(['query', '--help'], standalone_mode=False)\n"
        "assert 'importlib.metadata' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
