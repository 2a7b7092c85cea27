# SPDX-License-Identifier: Apache-2.0
"""Every block of code on every page runs, or says why it does not; every command that a page shows exists."""

import ast
import contextlib
import inspect
import operator
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import urllib.request

import click
import pytest

import fedvitals as fv
from documentation.code_blocks import COMMANDS, LANGUAGES, OUTPUT, PYTHON, Player, blocks_of
from documentation.links import markdown_files
from fedvitals.cli.main import app as cli
from support.page_setups import SETUPS
from support.paths import ROOT

GUIDES = ROOT / "docs" / "guide"  # played by test_guide.py
RESULTS = ("docs/faultbank/", "docs/reproduction/")  # reports of runs that took hours, written by the runs
PAGES = [page for page in markdown_files(ROOT) if not page.name.startswith("CHANGELOG")]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def path_of(block):
    return str(block.page.relative_to(ROOT))


def is_result(path):
    return path.startswith(RESULTS)


def runs_here(block):
    return not block.mark and block.language not in OUTPUT and not is_result(path_of(block))


RUNNING = sorted({path_of(block) for block in BLOCKS if runs_here(block) and block.page.parent != GUIDES})


def test_blocks_name_their_language_and_are_the_only_code():
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{path_of(block)}:{block.line}: {block.language or 'no language'}"
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        unfenced = re.findall(r"\n\n((?:    (?:fedvitals|pip|python|import|from|fv\.) .*\n)+)", text)
        assert not unfenced, f"{page.relative_to(ROOT)}: {unfenced}"


def test_reasons_for_not_running_are_given_and_tests_that_run_blocks_read_the_page():
    for block in BLOCKS:
        where = f"{path_of(block)}:{block.line}"
        if block.mark == "not run":
            assert len(block.reason.split()) >= 3, where
        for named in re.findall(r"(?:studies/)?tests/[\w/.]+", block.reason):
            assert (ROOT / named.rstrip(".")).exists(), f"{where}: {named}"
        if block.mark == "tested by":
            test = (ROOT / block.reason).read_text(encoding="utf-8")
            names = {block.page.name, block.page.parent.name, "pipe_federation.py"}
            assert any(name in test for name in names), f"{where}: {block.reason} does not mention {block.page.name}"


def resolve(words):
    """Return the click command that words name, and the words that are left for it."""
    command, context = cli, click.Context(cli)
    while isinstance(command, click.Group) and words and (found := command.get_command(context, words[0])):
        command, words = found, words[1:]
        context = click.Context(command, parent=context)
    return command, words


def test_commands_on_pages_exist_with_their_options():
    lines = [(block, line) for block in BLOCKS if block.language in COMMANDS for line in block.commands]
    ours = [(block, line) for block, line in lines if line.startswith("fedvitals ")]
    ours = [(block, line) for block, line in ours if block.page.parent.name != "plugin"]  # which brings its own verb
    assert len(ours) > 50
    for block, line in ours:
        where = f"{path_of(block)}: {line}"
        command, words = resolve(shlex.split(line, comments=True)[1:])
        assert command is not cli, f"{where}: there is no such verb"
        if command.context_settings.get("ignore_unknown_options"):  # they belong to a program that is called
            continue
        known = {"--help", *(name for option in command.params for name in (*option.opts, *option.secondary_opts))}
        used = {word.strip("[]").partition("=")[0] for word in words if word.lstrip("[").startswith("--")}
        assert used <= known, f"{where}: {command.name} has no option {', '.join(used - known)}"


@pytest.mark.thorough
@pytest.mark.parametrize("path", RUNNING)
def test_blocks_of_a_page_run(path, tmp_path, monkeypatch):
    for package in ("torch", "sklearn", "flwr", "transformers", "lightning", "nvflare", "pyarrow", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDVITALS_STORE", raising=False)
    monitors, monitor_class = [], fv.Monitor

    def tracked(*arguments, **settings):
        monitors.append(monitor_class(*arguments, **settings))
        return monitors[-1]

    monkeypatch.setattr(fv, "Monitor", tracked)
    player = Player()
    try:
        exec(SETUPS.get(path, ""), player.names)
        for block in blocks_of(ROOT / path):
            player.run(block)
    finally:
        for monitor in monitors:  # those of a page are closed when its program ends
            monitor.close()
        player.names.get("cleanup", contextlib.ExitStack()).close()
    for line, code in player.codes.items():
        assert code in ((0, 1) if line.startswith("fedvitals findings") else (0,)), f"{line}\n{player.printed[line]}"


def serving_lines():
    """The commands `fedvitals ui` of the pages of which this file is the test."""
    lines = [
        line
        for block in BLOCKS
        if block.mark == "tested by" and block.reason.endswith("test_code_blocks.py") and block.language in COMMANDS
        for line in block.commands
    ]
    return [line for line in lines if "postgresql://" not in line]  # tests/dashboard start a PostgreSQL server


@pytest.mark.thorough
@pytest.mark.parametrize("line", serving_lines())
def test_commands_that_serve_show_their_first_page(line, tmp_path):
    """Of docs/start.md and docs/dashboard.md."""
    with fv.Monitor(tmp_path / "runs.db", run="RUN") as monitor, monitor.round(0):
        monitor.log(accuracy=0.5)
    verb, *arguments = shlex.split(line, comments=True)
    assert verb == "fedvitals"
    command = [sys.executable, "-m", "fedvitals", *arguments, "--no-open", "--port", "0"]
    environment = {name: text for name, text in os.environ.items() if name != "FEDVITALS_STORE"}
    environment["PYTHONUNBUFFERED"] = "1"
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = re.search(r"http://\S+", server.stdout.readline())[0]
            with urllib.request.urlopen(address) as page:
                assert b"<html" in page.read()
        finally:
            server.terminate()


def test_blocks_of_python_that_are_not_run_name_what_there_is():
    """They compile, and every `fv.name` and `lab.name` in them is public."""
    blocks = [block for block in BLOCKS if block.mark == "not run" and block.language in PYTHON]
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block.code)):
            chain = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if re.fullmatch(r"(fv|lab)(\.\w+)+", chain):
                operator.attrgetter(chain.partition(".")[2])(fv if chain.startswith("fv.") else fv.lab)


def test_protocol_on_the_page_of_hosts_is_the_one_that_is_checked():
    """Of docs/hosts.md."""
    from fedvitals.testing import host_contract

    (block,) = [block for block in blocks_of(ROOT / "docs/hosts.md") if block.code.startswith("class HostDriver")]
    shown = {}
    exec("from __future__ import annotations\n" + block.code, vars(host_contract) | shown, shown)
    declared = host_contract.HostDriver
    assert shown["HostDriver"].__annotations__ == declared.__annotations__
    for method in ("client_names", "run"):
        assert str(inspect.signature(getattr(shown["HostDriver"], method))) == str(
            inspect.signature(getattr(declared, method))
        )


def test_sql_of_pages_reads_a_store(tmp_path):
    """Of docs/cure.md."""
    with fv.Monitor(tmp_path / "runs.db") as monitor, monitor.round(0):
        monitor.log(accuracy=0.5)
    with sqlite3.connect(tmp_path / "runs.db") as store:
        for block in BLOCKS:
            if block.language == "sql":
                store.execute(block.code).fetchall()


def test_receiver_of_the_opentelemetry_page_takes_what_its_client_sends(tmp_path):
    """Both sides of docs/opentelemetry.md, in one process."""
    pytest.importorskip("google.protobuf")
    import secrets

    server, client = (
        block.code for block in blocks_of(ROOT / "docs" / "opentelemetry.md") if block.reason.endswith("code_blocks.py")
    )
    inner = "\n".join(
        f"    {line}" for line in client.replace('"http://server:4318"', "receiver.endpoint").splitlines()
    )
    program = server.replace('host="0.0.0.0", port=4318)', "port=0) as receiver").replace("    ...", inner)
    with fv.Monitor(tmp_path / "runs.db") as monitor, monitor.round(0):
        names = {"fv": fv, "monitor": monitor, "secrets": secrets, "epochs": 2, "train": lambda: 0.5}
        prepared = "headers, token = monitor.host.headers('c7'), None\n"
        exec(prepared + program.replace("token=token", 'token=tokens["c7"]'), names)
    run = fv.open(tmp_path / "runs.db").newest
    assert "user.loss" in run.metric_names() or "loss" in run.metric_names()
