# SPDX-License-Identifier: Apache-2.0
"""`fedvitals lab --engine flower`: what is refused, what travels, and whole runs on Ray and on a SuperLink."""

import importlib
import signal
import sys
import tomllib

import msgspec
import pytest
import safetensors
import torch

from fedvitals import lab
from fedvitals.cli import main as cli
from fedvitals.errors import ConfigError
from fedvitals.hosts.flower.lab import launch
from fedvitals.hosts.flower.lab.app import LabAppSettings
from fedvitals.replay.player.player import Player
from fedvitals.replay.player.proof import verify
from fedvitals.replay.tape.reader import open_tape
from fedvitals.store import open_reader
from support.conditions import holds_for_each
from support.flower.lab_command import Command
from support.flower.processes import deployed

TOML = """dataset = "digits"
model = "mlp"
clients = 5
rounds = 12
seed = 3
local = {iterations = 3}
topology = {kind = "hierarchical", edges = 2}
"""


def described(folder, text=TOML):
    (folder / "e.toml").write_text(text)
    return msgspec.structs.replace(lab.read(text), name="e")


def refused(capsys, folder, *words):
    described(folder)
    with pytest.raises(SystemExit) as ended:
        cli.main(["lab", str(folder / "e.toml"), "--store", str(folder / "runs.db"), *words])
    assert ended.value.code != 0
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--superlink", "there"], "--superlink is for --engine flower"),
        (["--timeout", "3"], "--timeout is for --engine flower"),
        (["--engine", "flower", "--device", "cuda"], "trains on CPUs"),
        (["--engine", "flower", "--precision", "tf32"], "in float32"),
        (["--engine", "flower", "--unwatched"], "leave --unwatched out"),
        (["--engine", "flower", "--superlink", "there", "--resume"], "no state here"),
        (["--engine", "flower", "--workers", "0"], "at least 1"),
        (["--engine", "flower", "--timeout", "0"], "--timeout"),
        (["--engine", "flower", "--resume"], "nothing to resume"),
        (["--engine", "flower", "--set", "local.keep_optimizer=true"], "keep_optimizer"),
        (["--engine", "flower", "--set", "dataset=gtsrb", "--data", "/"], "gtsrb was not found"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(capsys, tmp_path, words, message):
    assert message in refused(capsys, tmp_path, *words)
    assert not (tmp_path / "runs.db.d").exists()


def test_without_flower_its_extra_is_named(capsys, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("fedvitals.hosts.flower", "flwr"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    assert "fedvitals[flower]" in refused(capsys, tmp_path, "--engine", "flower")


def test_an_old_flower_or_one_without_ray_is_told(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.21.0")
    with pytest.raises(ConfigError, match=r"1\.38 or newer; installed is 1\.21\.0"):
        launch.check_installed(simulation=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.41.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"flwr\[simulation\]"):
        launch.check_installed(simulation=True)
    launch.check_installed(simulation=False)


def test_a_password_stays_on_this_machine(capsys, tmp_path, monkeypatch):
    """An app's configuration goes to every node: an address of a database is in the server's environment alone."""
    seen = []
    monkeypatch.setattr(launch, "simulate", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(launch, "submit", lambda *arguments: seen.append(arguments))
    monkeypatch.chdir(tmp_path)
    address = "postgresql://ann:secret@127.0.0.1:1/lab"
    for more in ([], ["--superlink", "there"]):
        refused(capsys, tmp_path, "--engine", "flower", "--store", address, *more)
    (settings, _, _, environment), (submitted, name, _) = seen
    assert "secret" not in str(settings)
    assert "secret" not in str(submitted)
    assert environment["FEDVITALS_STORE"] == address
    assert name == "there"
    assert lab.read(submitted["experiment"]) == described(tmp_path)


def test_the_app_that_flower_is_given(tmp_path):
    told = {"experiment": TOML, "nodes": 3, "resume": False}
    folder = launch.write_app(tmp_path / "app", told)
    written = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert written["config"] == told
    assert msgspec.convert(written["config"], LabAppSettings).experiment == TOML
    assert set(written["components"].values()) == {"fedvitals_lab.app:server_app", "fedvitals_lab.app:client_app"}


# -- real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.flower
def test_on_ray_stopped_by_hand_and_resumed(tmp_path):
    """Ctrl-C takes Ray and the SuperLink down; the state that is left, and the end of the run, are sequential's."""
    e = described(tmp_path)
    with Command(tmp_path, "--engine", "flower", "--workers", "2") as first:
        first.until("round 2/12")
        first.process.send_signal(signal.SIGINT)
        assert first.process.wait(120) == 130, first.said
        assert not first.left()
    (saved,) = tmp_path.glob("runs.db.d/lab/*/*/state.safetensors")
    with safetensors.safe_open(saved, framework="pt") as opened:
        state, rounds = opened.get_tensor("model"), int(opened.metadata()["rounds"])
        assert opened.metadata()["engine"] == "flower"
    assert torch.equal(state, lab.run(msgspec.structs.replace(e, rounds=rounds), engine="sequential").state)

    with Command(tmp_path, "--resume") as another:
        another.until("--engine flower")  # «auto» would go on with other bits

    with Command(tmp_path, "--engine", "flower", "--workers", "2", "--resume", "--json") as second:
        said = second.result()
        assert not second.left()
    assert said["metrics"] == lab.run(e, engine="sequential").rounds[-1].metrics
    assert (said["rounds"], said["engine"]) == (12, "flower")
    assert not (tmp_path / "runs.db.d" / "lab").exists()
    with Player(open_tape(tmp_path / "runs.db", said["run"])) as player:  # the tape went on, too
        assert verify(player).proved == [*range(12)]
    with open_reader(tmp_path / "runs.db") as reader:
        assert reader.history(said["run"]).rounds() == list(range(12))


@pytest.mark.slow
@pytest.mark.flower
def test_on_a_superlink_of_ones_own(tmp_path):
    """The same file on SuperNodes; when one is killed, its clients are named, and the other trains them from then."""
    e = described(tmp_path, TOML.replace("12", "4").replace("topology", "# topology"))
    (tmp_path / "federation").mkdir()
    with deployed(tmp_path / "federation") as federation:
        nodes = federation.add_nodes(2)
        home = tmp_path / "home"
        home.mkdir()
        address = f"127.0.0.1:{federation._port}"
        (home / "config.toml").write_text(f'[superlink.there]\naddress = "{address}"\ninsecure = true\n')
        words = ("--engine", "flower", "--superlink", "there", "--workers", "2", "--json")
        with Command(tmp_path, *words, FLWR_HOME=str(home)) as command:
            command.until("round 1/4")
            nodes[0].kill()
            said = command.result()
    assert said["rounds"] == 4
    place = sorted(int(node.identity) for node in nodes).index(int(nodes[0].identity))
    with open_reader(tmp_path / "runs.db") as reader:
        failed = reader.history(said["run"]).events("client.failed")
        first = reader.history(said["run"]).series("accuracy", None)[1][0]
    assert {event.where.node for event in failed} == {f"c{i}" for i in range(5) if i % 2 == place}
    assert holds_for_each(f"SuperNode {nodes[0].identity}" in event.message for event in failed)
    assert len({event.where.round for event in failed}) == 1  # then it is known that the node is gone
    assert first == lab.run(e, engine="sequential").rounds[0].metrics["accuracy"]
