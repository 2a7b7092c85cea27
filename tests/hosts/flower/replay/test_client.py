# SPDX-License-Identifier: Apache-2.0
"""A client's own tape: what it was sent is run again at its site with the same bits, under a debugger if one likes."""

import io
import json
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.cli.main import main
from fedvitals.errors import ConfigError, StoreError
from fedvitals.hosts.flower import unmodified
from fedvitals.hosts.flower.rerun.app import client_app as app_in
from fedvitals.hosts.flower.rerun.app import strategy_of
from fedvitals.hosts.flower.rerun.client import rerun_client
from fedvitals.hosts.flower.tape.client import client_tape, wait_for_writers
from fedvitals.hosts.flower.tape.entries import ClientTapeFolder
from fedvitals.hosts.watch_settings import FLOWER, WatchSettings
from support.flower.federation import (
    HandGrid,
    client_app,
    evaluation,
    federate,
    flower_run,
    keys_and_bytes,
    model,
    numbers,
    requests_for,
    training,
)

RUN = "flower-7"


def drawing(message, context):
    """Uses all generators, what it was told, and what it remembers from the message before."""
    memory = context.state.get("memory", ConfigRecord({"calls": 0}))
    past = context.state.get("past", ArrayRecord({"w": Array(np.zeros(4))}))["w"].numpy()
    learnt = {}
    for name, array in message.content["arrays"].items():
        noise = torch.randn(array.numpy().shape).numpy() + random.random() + np.random.normal()  # noqa: NPY002
        learnt[name] = Array((array.numpy() + noise + past.sum() + memory["calls"]).astype(np.float32))
    context.state["memory"] = ConfigRecord({"calls": memory["calls"] + 1})
    context.state["past"] = ArrayRecord({"w": Array(np.random.normal(size=4))})  # noqa: NPY002
    share = context.node_config["partition-id"]
    metrics = MetricRecord({"num-examples": 20 + share, "train_loss": float("nan")})
    return Message(RecordDict({"arrays": ArrayRecord(learnt), "metrics": metrics}), reply_to=message)


def recorded(folder, train=drawing, *, rounds=3, tape=None, **more):
    app = client_app(fv.flower.client_mod(tape=tape or folder / "site"), train=train)
    result, grid = federate(FedAvg(), app, rounds=rounds, **more)
    wait_for_writers()
    return folder / "site", result, grid


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("client"))[0]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_message_gives_the_same_bits_again(site, number):
    app = client_app(train=drawing)
    before = torch.get_rng_state().numpy().tobytes(), random.getstate()
    for node in ("100", "101", "102", "103"):
        found = rerun_client(site, number, node, app=app)
        assert found.holds, str(found)
        assert (found.run, found.round, found.phase, found.notes) == (RUN, number, "train", [])
    assert (torch.get_rng_state().numpy().tobytes(), random.getstate()) == before
    assert rerun_client(site, number, "101", app=app, phase="evaluate").holds


def test_a_tape_changes_nothing(tmp_path):
    """What the client answers, what it remembers, and where the generators stand."""
    seen = []
    for tape in (None, tmp_path / "site"):
        app = client_app(fv.flower.client_mod(tape=tape), train=drawing)
        torch.manual_seed(0)
        result, grid = federate(FedAvg(), app, rounds=3)
        wait_for_writers()
        stood = random.getstate(), torch.get_rng_state().numpy().tobytes()
        states = [keys_and_bytes(state) for state in grid._states.values()]
        requests = [keys_and_bytes(request.content) for request in grid.requests]
        seen.append((numbers(result.arrays), states, requests, stood))
    assert seen[0] == seen[1]


def test_nothing_of_it_leaves_the_site(tmp_path):
    sent = []

    def fate(_, reply):
        sent.append({key: [*record] for key, record in reply.content.items()})
        return reply

    recorded(tmp_path, rounds=1, fate=fate)
    assert {key for reply in sent for key in reply} == {"arrays", "metrics", "fedvitals"}
    assert (tmp_path / "site" / RUN).stat().st_mode & 0o077 == 0


def test_the_first_number_that_differs_is_named_with_both_values(site):
    def otherwise(message, context):
        reply = drawing(message, context)
        values = reply.content["arrays"]["head.weight"].numpy().copy()
        values[1, 2] = np.nextafter(values[1, 2], np.float32(-np.inf))
        reply.content["arrays"]["head.weight"] = Array(values)
        return reply

    found = rerun_client(site, 2, "101", app=client_app(train=otherwise))
    wrong = found.mismatch
    assert found.holds is False
    assert (wrong.layer, wrong.index, wrong.node) == ("head.weight", (1, 2), "101")
    assert wrong.replayed == float(np.nextafter(np.float32(wrong.recorded), np.float32(-np.inf)))
    assert "head.weight" in str(found)
    assert repr(wrong.recorded) in str(found)


def test_another_shape_and_another_metric_are_told(site):
    def otherwise(message, context):
        reply = drawing(message, context)
        reply.content["metrics"]["train_loss"] = 2.5
        return reply

    found = rerun_client(site, 2, "101", app=client_app(train=otherwise))
    assert found.holds  # a number beside the arrays may be a time
    assert found.notes == ["metrics/train_loss was nan, and is 2.5 now."]

    def narrower(message, context):
        reply = drawing(message, context)
        reply.content["arrays"]["dense.bias"] = Array(np.zeros(3, np.float32))
        return reply

    wrong = rerun_client(site, 2, "101", app=client_app(train=narrower)).mismatch
    assert (wrong.recorded, wrong.replayed) == ("float32 [4]", "float32 [3]")


def fragile(message, context):
    if context.node_id == 101 and message.content["config"]["server-round"] == 2:
        raise RuntimeError("cannot read /data/patients")
    return training(message, context)


def test_an_exception_is_recorded_and_raised_again(tmp_path):
    folder, *_ = recorded(tmp_path, fragile)
    found = rerun_client(folder, 2, "101", app=client_app(train=fragile))
    assert found.holds
    assert found.error == found.recorded_error == "RuntimeError: cannot read /data/patients"
    assert "in fragile" in found.traceback
    assert "rerun" not in found.traceback
    cured = rerun_client(folder, 2, "101", app=client_app())
    assert cured.holds is False
    assert "RuntimeError" in str(cured)


def asked(number=1):
    with flower_run():
        (message,) = requests_for(HandGrid(client_app(), 1), model())
    message.metadata.__dict__["_message_id"] = "one"
    message.content["config"] = ConfigRecord({"server-round": number})
    return message, Context(run_id=7, node_id=100, node_config={}, state=RecordDict(), run_config={"rate": 0.1})


def test_a_client_that_was_killed_can_be_run_again(tmp_path):
    """Its message is on the tape before its handler is done."""
    message, context = asked()
    process = os.fork()
    if process == 0:  # the child never gets to answer
        recording = client_tape(tmp_path).begin(message, context, training)
        recording._thread.join()
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    found = rerun_client(tmp_path, 1, "100", app=client_app())
    assert found.holds is None
    assert found.reply.content["metrics"]["num-examples"] == 20
    assert "nothing to compare" in str(found)


def test_a_full_tape_keeps_the_newest_messages(tmp_path):
    tape = fv.Tape(folder=tmp_path / "site", budget="150 KB")
    recorded(tmp_path, rounds=8, nodes=2, tape=tape)
    site = ClientTapeFolder(tmp_path / "site")
    assert site.bytes() <= 150_000
    kept = [number for number, _ in site.messages(RUN, "101")]
    assert kept == sorted(kept)
    assert kept[-1] == 8
    assert 1 not in kept
    assert rerun_client(tmp_path / "site", 8, "101", app=client_app(train=drawing)).holds
    with pytest.raises(StoreError, match=r"no train message of round 1. It has: .*8 \(train\)"):
        rerun_client(tmp_path / "site", 1, "101", app=client_app())


def test_a_disk_that_takes_nothing_costs_the_client_nothing(tmp_path, caplog):
    (tmp_path / "site").write_text("a file")
    torch.manual_seed(0)
    _, result, _ = recorded(tmp_path)
    assert "tape lacks something" in caplog.text
    torch.manual_seed(0)
    plain, _ = federate(FedAvg(), client_app(train=drawing), rounds=3)
    assert numbers(result.arrays) == numbers(plain.arrays)


# -- who is meant -----------------------------------------------------------------------------------------------------


def test_nodes_and_runs_are_found_as_people_call_them(site):
    app = client_app(train=drawing)
    assert rerun_client(site, 1, "partition 2", app=app, run="7").node == "102"
    for said, words in (("c7", "100"), ("../../etc", "100"), ("objects", "100")):
        with pytest.raises(StoreError, match=words):
            rerun_client(site, 1, said, app=app)
    with pytest.raises(StoreError, match="flower-7"):
        rerun_client(site, 1, "101", run="flower-8", app=app)
    with pytest.raises(StoreError, match="client_mod"):
        rerun_client(site / "nothing", 1, "101", app=app)


@pytest.mark.parametrize("tape", [7, fv.Tape()])
def test_a_tape_of_a_client_needs_a_folder(tape):
    with pytest.raises(ConfigError, match="folder"):
        fv.flower.client_mod(tape=tape)


# -- damaged or hostile files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: {**entry, "content": {"arrays": {"kind": "arrays", "arrays": [["w", "elsewhere"]]}}},
        lambda entry: {**entry, "content": {"arrays": {"kind": "arrays", "arrays": 7}}},
        lambda entry: {**entry, "content": {"x": {"kind": "config", "values": {"a": {"bytes": "???"}}}}},
        lambda entry: {**entry, "sent": "../../../../etc/passwd"},
        lambda entry: {**entry, "rng": {**entry["rng"], "numpy": [entry["rng"]["numpy"][0], 10**9, 0, 0.0]}},
        lambda entry: {**entry, "rng": {**entry["rng"], "python": [3, "gASVJAAAAA==", None]}},
        lambda entry: {**entry, "metadata": {}},
        lambda entry: {**entry, "context": {"run_id": "x"}},
        lambda entry: {**entry, "threads": "many"},
        lambda entry: {**entry, "version": 99},
    ],
)
def test_what_somebody_else_wrote_into_a_tape_is_an_error_that_says_so(site, tmp_path, change):
    shutil.copytree(site, tmp_path / "site")
    file = tmp_path / "site" / RUN / "101" / "00000002-train"
    entry = json.loads(zstandard.ZstdDecompressor().decompress(file.read_bytes()))
    file.write_bytes(zstandard.ZstdCompressor().compress(json.dumps(change(entry)).encode()))
    before = random.getstate()
    with pytest.raises(StoreError):
        rerun_client(tmp_path / "site", 2, "101", app=client_app(train=drawing))
    assert random.getstate() == before


def test_bytes_that_are_no_entry_are_an_error_that_names_the_file(site, tmp_path):
    shutil.copytree(site, tmp_path / "site")
    file = tmp_path / "site" / RUN / "101" / "00000002-train"
    for content in (b"", b"cos\nsystem\n(S'true'\ntR.", file.read_bytes()[:-9]):
        file.write_bytes(content)
        with pytest.raises(StoreError, match="00000002-train cannot be read"):
            rerun_client(tmp_path / "site", 2, "101", app=client_app(train=drawing))


# -- the app in its folder --------------------------------------------------------------------------------------------

PYPROJECT = """
[project]
name = "{name}"
version = "1.0.0"
[tool.flwr.app.components]
serverapp = "{name}.server_app:app"
clientapp = "{name}.client_app:app"
[tool.flwr.app.config]
eta = 0.25
[tool.flwr.app.config.more]
beta = 2
"""
CLIENT = """
import numpy as np
import torch
import zstandard
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
import fedvitals as fv

app = ClientApp(mods=[fv.flower.client_mod(tape={tape!r})])


@app.train()
def train(message, context):
    rate = 0.1
    arrays = {{k: Array(v.numpy() + rate * torch.randn(v.shape).numpy()) for k, v in message.content["arrays"].items()}}
    metrics = MetricRecord({{"num-examples": 3}})
    return Message(RecordDict({{"arrays": ArrayRecord(arrays), "metrics": metrics}}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    return Message(RecordDict({{"metrics": MetricRecord({{"num-examples": 3}})}}), reply_to=message)
"""
SERVER = """
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam
import fedvitals as fv

app = ServerApp()


class Own(FedAdam):
    pass


def factory():
    return Own(eta=0.5)


@app.main()
def main(grid, context):
    assert context.run_config["more.beta"] == 2
    strategy = fv.flower.attach(Own(eta=context.run_config["eta"]), fv.Monitor("nowhere.db"))
    strategy.start(grid, ArrayRecord({"w": Array(np.zeros(3))}), num_rounds=2)
"""


@pytest.fixture
def folder(tmp_path, request):
    """An app with lines of fedvitals in it; its package has a name of its own."""
    name = f"tapedapp{abs(hash(request.node.name)) % 10**8}"
    package = tmp_path / "app" / name
    package.mkdir(parents=True)
    (tmp_path / "app" / "pyproject.toml").write_text(PYPROJECT.format(name=name))
    (package / "__init__.py").write_text("")
    (package / "client_app.py").write_text(CLIENT.format(tape=str(tmp_path / "site")))
    (package / "server_app.py").write_text(SERVER)
    yield tmp_path / "app"
    sys.path[:] = [path for path in sys.path if path != str(tmp_path / "app")]


@pytest.fixture
def taped(folder, monkeypatch):
    """A run of it; gives the folder of its clients' tapes."""
    federate(FedAvg(), app_in(folder), rounds=2)
    wait_for_writers()
    monkeypatch.chdir(folder.parent)
    return folder.parent / "site"


def test_the_app_that_is_named_is_run_and_not_recorded_again(taped, folder):
    before = [(path, path.stat().st_mtime_ns) for path in sorted(taped.rglob("*")) if path.is_file()]
    found = rerun_client(taped, 2, "101", app=folder)
    assert found.holds, str(found)
    assert found.app == str(folder)
    file, _, line = found.handler.rpartition(":")
    assert Path(file).read_text().splitlines()[int(line) - 1] in ("@app.train()", "def train(message, context):")
    assert [(path, path.stat().st_mtime_ns) for path in sorted(taped.rglob("*")) if path.is_file()] == before
    with pytest.raises(ConfigError, match=f"app is in {folder}. Nothing was run"):
        rerun_client(taped, 2, "101")
    with pytest.raises(ConfigError, match="is no Flower app"):
        rerun_client(taped, 2, "101", app=taped)


def test_pdb_stops_at_the_first_line_of_the_users_handler(taped, folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("p message.metadata.message_type\nn\np rate\nc\n"))
    found = rerun_client(taped, 2, "101", app=folder, debugger=True)
    said = capsys.readouterr().out
    assert "-> rate = 0.1" in said
    assert "'train'" in said
    assert "(Pdb) 0.1" in said
    assert found.holds, str(found)
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    left = rerun_client(taped, 2, "101", app=folder, debugger=True)
    assert left.holds is None
    assert "left" in left.notes[0]


def test_pdb_after_an_exception_stands_where_it_was_raised(tmp_path, monkeypatch, capsys):
    where, *_ = recorded(tmp_path, fragile)
    monkeypatch.setattr("sys.stdin", io.StringIO("c\np message.content['config']['server-round']\nq\n"))
    found = rerun_client(where, 2, "101", app=client_app(train=fragile), debugger=True)
    assert "(Pdb) 2" in capsys.readouterr().out
    assert found.holds


def test_the_command_of_the_site(taped, folder, capsys, monkeypatch):
    told_it = ["replay", "flower-7", "--round", "2", "--node", "101", "--tape", str(taped)]
    assert exit_code(told_it) == 2  # code is run only from what is named
    assert f"--app {folder}" in capsys.readouterr().err
    told_it += ["--app", str(folder)]
    assert exit_code(told_it) == 0
    assert "The same bits: round 2 (train), node 101." in capsys.readouterr().out
    assert exit_code([*told_it, "--json", "--verify"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["holds"] is True
    monkeypatch.setattr("sys.stdin", io.StringIO("p message.metadata\nc\n"))
    assert exit_code([*told_it, "--pdb"]) == 0
    assert "Metadata" in capsys.readouterr().out
    file = next(folder.rglob("client_app.py"))
    file.write_text(file.read_text().replace("rate = 0.1", "rate = 0.2"))
    os.utime(file, (2e9, 2e9))  # else bytecode of the same second and length would be taken for it
    sys.modules.pop(f"{file.parent.name}.client_app")
    assert exit_code([*told_it, "--verify"]) == 1
    assert "differs" in capsys.readouterr().out
    assert exit_code(["replay", "flower-7", "--tape", str(taped)]) == 2


def exit_code(words):
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code or 0)


def test_a_strategy_is_found_by_running_the_app_up_to_its_start(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = strategy_of(folder, {})
    assert (type(found).__name__, found.eta) == ("Own", 0.25)
    assert strategy_of(folder, {"eta": 0.75}).eta == 0.75
    name = next(folder.rglob("server_app.py")).parent.name
    assert strategy_of(folder, {}, f"{name}.server_app:factory").eta == 0.5
    assert type(strategy_of(folder, {}, f"{name}.server_app:Own")).__name__ == "Own"
    assert not (tmp_path / "nowhere.db").exists()
    with pytest.raises(ConfigError, match="module:name"):
        strategy_of(folder, {}, "nothing")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        strategy_of(folder, {}, f"{name}.server_app:nothing")


def test_the_command_of_the_server(folder, tmp_path, capsys):
    store = tmp_path / "runs.db"
    with fv.Monitor(store, run="own", tape=fv.Tape(every=1, updates=2, durable=True), machine=False) as monitor:
        federate(strategy_of(folder, {}), client_app(), monitor, rounds=3)
    words = ["replay", "own", "--store", str(store)]
    assert exit_code([*words, "--round", "2", "--app", str(folder)]) == 0
    assert "The same bits: round 2, Own, 4 replies." in capsys.readouterr().out
    assert exit_code([*words, "--verify", "--app", str(folder), "--json"]) == 0
    assert [one["round"] for one in json.loads(capsys.readouterr().out)["result"]] == [2, 3]
    assert exit_code([*words, "--verify"]) == 2  # nobody can make it by its name
    assert "--app DIR" in capsys.readouterr().err
    assert exit_code([*words, "--round", "2", "--node", "101", "--pdb"]) == 2
    assert "--tape FOLDER" in capsys.readouterr().err


# -- with no line in the app ------------------------------------------------------------------------------------------


def test_by_the_environment_apps_without_a_line_have_tapes(tmp_path, monkeypatch):
    variables = WatchSettings(tape=str(tmp_path / "site")).variables({}, FLOWER)
    assert variables["FEDVITALS_TAPE"] == str(tmp_path / "site")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FEDVITALS_STORE", str(tmp_path / "runs.db"))
    app = ClientApp(mods=unmodified._with_our_mod(None))
    app.train()(training)
    app.evaluate()(evaluation)
    federate(FedAvg(), app, rounds=1)
    assert rerun_client(tmp_path / "site", 1, "101", app=client_app()).holds
    visit = unmodified.ServerAppRun(
        None, Context(run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config={})
    )
    monitor = visit._new_monitor()
    assert monitor.host.recorder is not None
    monitor.close()
