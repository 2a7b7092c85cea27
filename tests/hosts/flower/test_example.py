# SPDX-License-Identifier: Apache-2.0
"""The Flower example works as its README says: its own commands are run, and the client that is made ill is named."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.views.cases import cases_of
from support.flower.processes import QUIET, free_ports
from support.paths import ROOT

pytest.importorskip("flwr")
psutil = pytest.importorskip("psutil")

EXAMPLE = ROOT / "examples" / "flower-quickstart"
MARK = "FEDVITALS_TEST_EXAMPLE"
ILL = 3  # the partition that the README makes ill
SECONDS = 240  # for a command, on a machine with much else to do


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", (EXAMPLE / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def ill_run() -> str:
    (found,) = [line for line in commands() if line.endswith(f'--run-config "ill-partition={ILL}"')]
    return found


@contextlib.contextmanager
def flower_home(folder: Path):
    """Where `flwr run` starts a SuperLink of its own, as it does for a user; in the end nothing of it is left."""
    ports, mark = free_ports(2), uuid.uuid4().hex
    home = folder / "home"
    own = {"FLWR_HOME": str(home), "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(ports[0]), MARK: mark}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **QUIET, **own, "FLWR_LOCAL_CONTROL_API_PORT": str(ports[1]), "PATH": path}
    environment["OMP_NUM_THREADS"] = "1"
    environment.pop("FEDVITALS_STORE", None)
    try:
        yield environment
    finally:
        for _ in range(20):  # one may start another while they are ended
            if not (left := marked(mark)):
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, 5)


def marked(mark: str) -> list:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_our_lines_are_two_and_a_third():
    """As the README's table has them; without them nothing knows of fedvitals but two imports."""
    sources = {file.name: file.read_text() for file in (EXAMPLE / "quickstart").glob("*.py")}
    ours = [line.strip() for text in sources.values() for line in text.splitlines() if re.search(r"\bfv\.", line)]
    assert len(ours) == 3
    readme = (EXAMPLE / "README.md").read_text()
    for name, line in re.findall(r"^\| \[(\w+\.py)\]\([\w/.]+\) \| `([^`]+)`", readme, re.MULTILINE):
        assert line.removeprefix("with ").split(", ...")[0] in sources[name]


def test_the_readmes_runs_differ_by_who_is_ill():
    healthy, ill = [line for line in commands() if line.startswith("flwr run")]
    assert ill == ill_run() == f'{healthy} --run-config "ill-partition={ILL}"'
    for target in re.findall(r"\]\((?!http)([^)]+)\)", (EXAMPLE / "README.md").read_text()):
        assert (EXAMPLE / target).exists(), target


@pytest.mark.flower
def test_the_ill_client_is_found_by_the_readmes_commands(tmp_path):
    app = tmp_path / "app"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("__pycache__", "*.db*"))

    def play(line: str, environment: dict[str, str]) -> str:
        done = subprocess.run(
            shlex.split(line), cwd=app, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        said = done.stdout + done.stderr
        assert done.returncode == (1 if line.startswith("fedvitals findings") else 0), f"{line}\n{said[-4000:]}"
        return said

    with flower_home(tmp_path) as environment:
        log = play(ill_run(), environment)
        assert "Received 8 results and 0 failures" in log, log[-4000:]
        looks = [line for line in commands() if line.startswith("fedvitals ") and line != "fedvitals ui"]
        said = {line: play(line, environment) for line in looks}
    with open_reader(app / "runs.db") as reader:
        run = queries.find_run(reader, "digits")
        history = reader.history(run)
        partitions = {event.where.node: event.data["partition"] for event in history.events("client.partition")}
        assert sorted(partitions.values()) == list(range(8))
        (ill,) = [node for node, partition in partitions.items() if partition == ILL]
        serious = [case for case in cases_of(reader, run) if case.severity != "note"]
        assert {case.node for case in serious} == {ill}
        assert "LABEL_NOISE" in {case.issue for case in serious}
        assert len(history.latest("gradient.norm", history.rounds()[-1])) == 8  # by the third line, fv.watch
    assert ill in said["fedvitals findings digits --all"]
    (query,) = [line for line in said if line.startswith("fedvitals query")]
    assert re.search(rf"{ill}\s+Partition {ILL}\.", said[query])
