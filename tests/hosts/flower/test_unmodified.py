# SPDX-License-Identifier: Apache-2.0
"""Flower apps with no line of ours in them: watched through the environment of their processes, and unchanged by it."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedvitals.cli import doctor, flower
from fedvitals.cli.main import main
from fedvitals.errors import ConfigError
from fedvitals.hosts.flower.superlink import superlink
from fedvitals.hosts.startup_path import SITE_FOLDER
from fedvitals.hosts.watch_settings import FLOWER, WatchSettings
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from support.flower.processes import QUIET, deployed
from support.paths import TESTS

APPS = TESTS / "support" / "flower" / "plain_apps.py"
MARK = "FEDVITALS_TEST_UNMODIFIED"
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "plainapp"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "someone"
[tool.flwr.app.components]
serverapp = "plainapp.server_app:app"
clientapp = "plainapp.client_app:app"
[tool.flwr.app.config]
num-server-rounds = 2
out = "model.npz"
"""
CLIENT = """
import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    data = np.random.default_rng(context.node_config["partition-id"]).normal(size=(64, 8))
    weights = message.content["arrays"]["w"].numpy()
    for _ in range(5):
        error = data @ weights - data.sum(axis=1)
        weights = weights - 0.1 * data.T @ error / 64
    metrics = MetricRecord({"num-examples": 64, "loss": float((error**2).mean())})
    return Message(RecordDict({"arrays": ArrayRecord({"w": Array(weights)}), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 64, "seen": 1.0})}), reply_to=message)
"""
SERVER = """
import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    start, rounds = ArrayRecord({"w": Array(np.zeros(8))}), context.run_config["num-server-rounds"]
    result = FedAvg(min_available_nodes=2).start(grid=grid, initial_arrays=start, num_rounds=rounds, timeout=60)
    np.savez(context.run_config["out"], **{name: array.numpy() for name, array in result.arrays.items()})
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("app")
    (folder / "plainapp").mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    for name, text in {"__init__": "", "client_app": CLIENT, "server_app": SERVER}.items():
        (folder / "plainapp" / f"{name}.py").write_text(text)
    return folder


def python(*words: object, path: tuple[object, ...] = (), timeout: float = 120, **environment: str) -> tuple[str, str]:
    """What a new Python says, with these folders on its path: to stdout, and to stderr."""
    settings = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=settings, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def came_of(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """What came of the plain apps, unwatched and watched, and the store of the latter."""
    store = tmp_path_factory.mktemp("unmodified") / "runs.db"
    plain, _ = python(APPS, path=[SITE_FOLDER, APPS.parent], FEDVITALS_FLOWER="0")
    ours, said = python(APPS, path=[SITE_FOLDER, APPS.parent], FEDVITALS_FLOWER="1", FEDVITALS_STORE=str(store))
    assert "does not watch" not in said
    return came_of(plain), came_of(ours), store


@pytest.mark.thorough
def test_apps_do_the_same_watched_or_not(watched):
    plain, ours, _ = watched
    assert ours["results"] == plain["results"]  # bit for bit: floats are written so that they can be read back
    assert ours["counted"] == plain["counted"]  # the app's own mod was called for each message
    assert plain["mods"] == ["counting_mod"]
    assert ours["mods"] == ["fedvitals", "counting_mod"]


def told_by_clients(reader, run: str) -> set[str]:
    """The clients whose processes had the mod: they alone know their CPU time."""
    tables = [queries.round_table(reader, run, number) for number in reader.history(run).rounds()]
    return {node for table in tables for node, metrics in table.items() if node is not None and "time.cpu" in metrics}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("run", "rounds"),
    [
        ("flower-1", 2),  # a strategy of Flower's
        ("flower-2", 2),  # a strategy with a start() of its own
        ("flower-3", 3),  # no strategy: a loop on the grid
        ("flower-4", 1),  # queries first, then a strategy
        ("flower-5", 1),  # a loop,
        ("flower-5-2", 1),  # a strategy after it,
        ("flower-5-3", 2),  # and another one
        ("flower-7", 1),  # ends by an exception
        ("flower-8", 2),  # the older API
    ],
)
def test_each_is_seen_whole(watched, run, rounds):
    """Rounds as the app counts them, and of each client what only its mod can tell."""
    with open_reader(watched[2]) as reader:
        summary = queries.summary_of(reader, run)
        assert (summary.rounds, summary.clients, summary.lost) == (rounds, 3, 0)
        assert summary.host == "flower"
        assert summary.finished is not None
        told = queries.events(reader, run)
        trained = [e.where.round for e in told if e.name == "cohort" and dict(e.data)["phase"] == "train"]
        assert sorted(trained) == [*range(1, rounds + 1)]
        assert told_by_clients(reader, run) == {"11", "12", "13"}
        assert not [event for event in told if event.name == "telemetry.refused"]


@pytest.mark.thorough
def test_who_attached_a_monitor_keeps_it_and_has_no_other(watched):
    with open_reader(watched[2]) as reader:
        runs = queries.list_runs(reader)
    assert [run.rounds for run in runs if run.name == "own"] == [1]
    assert not [run.id for run in runs if run.id.startswith("flower-6")]


@pytest.mark.thorough
def test_what_the_app_raises_is_told_and_raised(watched):
    plain, _, store = watched
    assert plain["results"]["raises"] == "on purpose"
    with open_reader(store) as reader:
        told = [event for event in queries.events(reader, "flower-7") if event.name == "round.failed"]
    assert [dict(event.data)["exception"] for event in told] == ["ZeroDivisionError"]


@pytest.mark.thorough
@pytest.mark.parametrize("trouble", ["a setting", "no fedvitals", "a store"])
def test_the_app_runs_as_ever_whatever_is_wrong_with_us(watched, tmp_path, trouble):
    path, settings = [SITE_FOLDER, APPS.parent], {"FEDVITALS_STORE": str(tmp_path / "runs.db")}
    if trouble == "a setting":
        settings["FEDVITALS_PRIVACY"] = "lots"
    elif trouble == "a store":
        settings["FEDVITALS_STORE"] = "/proc/nowhere/runs.db"
    else:
        (tmp_path / "fedvitals").mkdir()
        (tmp_path / "fedvitals" / "__init__.py").write_text("raise RuntimeError('broken on purpose')")
        path = [SITE_FOLDER, tmp_path, APPS.parent]
    out, said = python(APPS, "strategy", "loop", path=path, FEDVITALS_FLOWER="1", **settings)
    assert came_of(out)["results"] == {name: watched[0]["results"][name] for name in ("strategy", "loop")}
    assert re.search("fedvitals (does not watch this|lost)", said)


def test_the_sitecustomize_that_was_there_is_run_and_takes_our_place(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("word = 'theirs'\n")
    look = (
        "import sitecustomize as s, sys; print(s.word, [type(f).__name__ for f in sys.meta_path].count('ImportHook'))"
    )
    assert python("-c", look, path=[SITE_FOLDER, tmp_path], FEDVITALS_FLOWER="1")[0] == "theirs 1\n"
    assert python("-c", look, path=[SITE_FOLDER, tmp_path], FEDVITALS_FLOWER="")[0] == "theirs 0\n"
    (tmp_path / "sitecustomize.py").write_text("1 / 0\n")
    errors = [
        python("-c", "pass", path=path, FEDVITALS_FLOWER="1")[1] for path in ([tmp_path], [SITE_FOLDER, tmp_path])
    ]
    assert errors[0] == errors[1] != ""


def test_a_process_without_flower_loads_nothing_of_ours():
    look = "import sys; print([name for name in ('fedvitals', 'flwr', 'torch', 'logging') if name in sys.modules])"
    assert python("-c", look, path=[SITE_FOLDER], FEDVITALS_FLOWER="1")[0] == "[]\n"


def test_settings_travel_in_the_environment(tmp_path):
    said = WatchSettings(store="/x/runs.db", run="mine", probes="deep", privacy=0, tracebacks=False)
    variables = said.variables({"PYTHONPATH": "/a:"}, FLOWER)
    assert WatchSettings.read(variables) == said
    assert variables["PYTHONPATH"] == f"{SITE_FOLDER}:/a:"
    assert said.variables(variables, FLOWER)["PYTHONPATH"] == variables["PYTHONPATH"]  # once
    assert WatchSettings.read({}) == WatchSettings.read(dict.fromkeys(variables, "")) == WatchSettings()
    with pytest.raises(ConfigError, match="FEDVITALS_PRIVACY is a level from 0 to 4, got '-1'"):
        WatchSettings.read({"FEDVITALS_PRIVACY": "-1"})


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


def test_env_prints_what_a_shell_and_a_service_can_read(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("FEDVITALS_STORE", raising=False)
    assert command("flower", "env", "--run", "two words", "--tracebacks") == 0
    lines = [shlex.split(line)[1] for line in capsys.readouterr().out.splitlines()]
    expected = {"FEDVITALS_FLOWER": "1", "PYTHONPATH": str(SITE_FOLDER), "FEDVITALS_STORE": str(tmp_path / "runs.db")}
    expected |= {"FEDVITALS_RUN": "two words", "FEDVITALS_TRACEBACKS": "1"}
    assert dict(line.split("=", 1) for line in lines) == expected
    assert command("flower", "env", "--run", "two words", "--tracebacks", "--file") == 0
    assert dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines()) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["superlink", "supernode"])
def test_flowers_servers_are_started_with_their_own_arguments(program):
    out, _ = python("-m", "fedvitals", "flower", program, "--privacy", "1", "--version")
    assert re.search(r"Flower version: \d+\.\d+", out)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([".", "--stream"], None),
        (["."], None),
        ([".", "far"], "10.0.0.1:8000"),
        (["-c", "a=1", ".", "--federation-config", "x=1", "far", "--stream"], "10.0.0.1:8000"),
        ([".", "memory"], None),
        ([".", "nobody"], None),
    ],
)
def test_which_superlink_flwr_goes_to(tmp_path, arguments, expected):
    home = {"FLWR_HOME": str(tmp_path)}
    assert flower.remote_address(arguments, home) is None  # there is no file yet
    (tmp_path / "config.toml").write_text(
        '[superlink]\ndefault = "here"\n[superlink.here]\naddress = ":local:"\n[superlink.far]\n'
        'address = "10.0.0.1:8000"\n[superlink.memory]\naddress = ":local-in-memory:"\n'
    )
    assert flower.remote_address(arguments, home) == expected


def test_what_is_said_where_nothing_was_recorded(capsys, tmp_path):
    store = str(tmp_path / "none.db")
    flower._closing(store, time.time(), None)
    assert f"no record of this run in {store}" in capsys.readouterr().out
    flower._closing(store, time.time(), "10.0.0.1:8000")
    assert re.search("SuperLink at 10.0.0.1:8000.*fedvitals flower supernode", capsys.readouterr().out, re.DOTALL)


@pytest.mark.parametrize(
    ("version", "state", "words"),
    [("1.20.0", "note", "too old"), ("1.21.0", "fine", "1.21.0"), ("9.0", "fine", "newer than what")],
)
def test_doctor_knows_which_flower_is_supported(monkeypatch, version, state, words):
    monkeypatch.setattr(doctor, "_version", lambda _: version)
    sign = next(sign for sign in doctor.environment() if sign.what == "flower")
    assert sign.state == state
    assert words in sign.text


def marked(mark: str) -> list[psutil.Process]:
    """Every process that runs with this mark in its environment: what was started with it, and what that started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found += [process] if process.environ().get(MARK) == mark else []
    return found


@pytest.fixture
def flwr(tmp_path):
    """Starts programs in an empty folder with a home of Flower's own; whatever happens, nothing of them is left."""
    mark = uuid.uuid4().hex
    (tmp_path / "cwd").mkdir()
    settings = {**os.environ, **QUIET, "FLWR_HOME": str(tmp_path / "home"), MARK: mark}
    settings.pop("PYTHONPATH", None)

    def start(*words: object) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        return subprocess.Popen([*map(str, words)], env=settings, cwd=tmp_path / "cwd", text=True, **pipes)

    def end() -> None:
        for process in marked(mark):
            with contextlib.suppress(psutil.Error):
                process.kill()

    start.settings, start.mark = settings, mark
    too_long = threading.Timer(420, end)  # nobody waits for ever
    too_long.start()
    yield start
    too_long.cancel()
    end()


def nothing_left(mark: str) -> bool:
    """Ray's workers see a little later than others that all is over."""
    until = time.monotonic() + 120
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.2)
    return not marked(mark)


@pytest.mark.flower
def test_flower_run_watches_a_simulation_and_changes_no_bit_of_it(flwr, app, tmp_path):
    place, plain, ours = Path(sys.executable).parent, tmp_path / "plain.npz", tmp_path / "ours.npz"
    with superlink(flwr.settings) as port:
        words = [place / "flwr", "run", app, "--stream", "-c", f"out='{plain}'"]
        its = flwr.settings | {flower.PORT: str(port)}
        subprocess.run(words, env=its, cwd=tmp_path / "cwd", capture_output=True, timeout=240, check=True)
    store = tmp_path / "runs.db"
    run = flwr(sys.executable, "-m", "fedvitals", "flower", "run", app, "--store", store, "-c", f"out='{ours}'")
    out, _ = run.communicate(timeout=240)
    assert run.returncode == 0, out[-3000:]
    before, after = np.load(plain), np.load(ours)
    assert {name: before[name].tobytes() for name in before} == {name: after[name].tobytes() for name in after}
    with open_reader(store) as reader:
        (found,) = queries.list_runs(reader)
        assert (found.name, found.rounds, found.clients, found.lost) == ("plainapp", 2, 2, 0)
        assert len(told_by_clients(reader, found.id)) == 2
    assert f"{found.id}: 2 rounds, 2 clients, in {store}" in out
    assert f"fedvitals ui {found.id} --store {store}" in out
    assert nothing_left(flwr.mark), marked(flwr.mark)


@pytest.mark.slow
@pytest.mark.flower
def test_flower_run_that_is_ended_takes_everything_along(flwr, app, tmp_path):
    """The simulation would go on without its SuperLink; what was measured until then is kept."""
    store = tmp_path / "runs.db"
    words = ["flower", "run", app, "--store", store, "--run", "cut short", "-c", "num-server-rounds=5000"]
    run = flwr(sys.executable, "-m", "fedvitals", *words)
    seen = ""
    for line in run.stdout:
        seen += line
        if "[ROUND 3/" in line:
            break
    run.send_signal(signal.SIGTERM)
    rest, _ = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGTERM, seen + rest
    assert nothing_left(flwr.mark), marked(flwr.mark)
    with open_reader(store) as reader:
        (found,) = queries.list_runs(reader)
        assert found.name == "cut short"
        assert found.rounds >= 2


@pytest.mark.slow
@pytest.mark.flower
def test_a_deployment_whose_servers_have_the_environment(app, tmp_path):
    """As by `fedvitals flower superlink` and `supernode`: each process of SuperLink and SuperNodes inherits it."""
    store = tmp_path / "runs.db"
    variables = WatchSettings(store=str(store), run="deployed").variables({}, FLOWER)
    with deployed(tmp_path, **variables) as federation:
        names = {node.identity for node in federation.add_nodes(2)}
        run = federation.submit(app, num_server_rounds=1, out=tmp_path / "model.npz")
        run.wait(240)
        with open_reader(store) as reader:
            (found,) = queries.list_runs(reader)
            assert (found.id, found.name, found.rounds, found.lost) == (f"flower-{run.number}", "deployed", 1, 0)
            assert told_by_clients(reader, found.id) == names
            assert not [event for event in queries.events(reader, found.id) if event.level == "error"]
