# SPDX-License-Identifier: Apache-2.0
"""The command line, as a person or a script uses it."""

import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals.cli import demo
from fedvitals.cli.main import main
from support.conditions import holds_for_each
from support.verbs import result, run


def recorded_demo(folder, *options):
    """The path of a new store with a run of the small demo."""
    pytest.importorskip("sklearn", reason="the demo needs scikit-learn")
    path = folder / "my runs.db"
    with pytest.raises(SystemExit) as done:
        main(["demo", "--quick", *options, "--store", str(path), "--json"])
    assert done.value.code == 0
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with the first two rounds of the small demo, in which nobody is ill yet."""
    return recorded_demo(tmp_path_factory.mktemp("cli"), "--rounds", "2")


@pytest.fixture(scope="module")
def whole_store(tmp_path_factory):
    """A store with the whole small demo; costly, so for thorough tests only."""
    return recorded_demo(tmp_path_factory.mktemp("cli"))


def small_run(path, name, nodes):
    """One round without data or loss."""
    torch.manual_seed(0)
    shared = nn.Linear(4, 3)
    with fv.Monitor(path, name, strict=True) as monitor, monitor.round(0, shared):
        for node in nodes:
            local = nn.Linear(4, 3)
            optimizer = torch.optim.SGD(local.parameters(), 0.1)
            with monitor.client(node, local):
                local(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()


def test_help_names_every_verb_and_loads_no_torch():
    """`fedvitals --help` is quick because it loads neither torch nor numpy."""
    code = (
        "import sys\nfrom fedvitals.cli.main import app\napp.main(['--help'], standalone_mode=False)\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules), 'too much loaded'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for verb in ("demo", "runs", "show", "query", "bench"):
        assert verb in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2], (
        "the summary of a verb is too long for a terminal of 80 columns"
    )


@pytest.mark.parametrize("words", ["runs", "show demo", "show demo --json", "query 'SELECT * FROM metrics'"])
def test_a_reader_that_closes_our_output_is_no_trouble(store, words):
    """`fedvitals show | head` must not end as if a problem had been found in the run."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "fedvitals", *shlex.split(words), "--store", str(store)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_demo_leaves_a_run_in_the_store(store, capsys):
    (found,) = result(capsys, "runs", "--store", store)
    assert (found["name"], found["rounds"], found["clients"], found["lost"]) == ("demo", 2, 10, 0)
    assert found["finished"] is not None
    assert 0 < found["accuracy"] <= 1


@pytest.mark.thorough
def test_demo_finds_the_client_with_wrong_labels(whole_store, capsys):
    """The ill client stands out most by the end of even the small demo, and the store holds the run."""
    (found,) = result(capsys, "runs", "--store", whole_store)
    assert (found["name"], found["rounds"], found["clients"], found["lost"]) == ("demo", 8, 10, 0)
    card = result(capsys, "show", "demo", "--store", whole_store)
    assert card["clients"][0]["name"] == "c7"
    assert card["clients"][0]["why"] == "other direction"


def test_commands_to_copy_quote_a_path_with_a_space(store, capsys):
    settings = SimpleNamespace(clients=3, rounds=2)
    demo._closing("r1", str(store), 0.5, 1.0, (), [], settings)
    lines = [line.split("   ")[0] for line in capsys.readouterr().out.splitlines() if "--store" in line]
    assert [shlex.split(line)[-2:] for line in lines] == [["--store", str(store)]] * 8


@pytest.mark.thorough
def test_a_finding_has_a_command_to_copy_that_quotes_a_path_with_a_space(whole_store, capsys):
    _, out, _ = run(capsys, "show", "demo", "--store", whole_store)
    lines = [line.partition(": ")[2] for line in out.splitlines() if "--store" in line]
    assert lines
    for line in lines:
        assert shlex.split(line)[-2:] == ["--store", str(whole_store)]


@pytest.mark.thorough
def test_demo_is_the_same_for_the_same_seed(whole_store, tmp_path, capsys):
    """Seeds are fixed: a second run gives the same accuracy and the same standing."""
    again = result(capsys, "demo", "--quick", "--store", tmp_path / "again.db")
    (first,) = result(capsys, "runs", "--store", whole_store)
    assert again["accuracy"] == first["accuracy"]
    assert isinstance(again["cases"], list)


def test_show_is_a_health_card(store, capsys):
    """Signs with their course, clients and layers with those that stand out first, and what was not measured."""
    code, out, _ = run(capsys, "show", "demo", "--store", store)
    assert code == 0
    for words in (
        "Vital signs",
        "accuracy",
        "stand out first",
        "c7",
        "Layers",
        "Health",
        "lost: 0 records",
    ):
        assert words in out


def test_verbs_without_a_run_take_the_newest_and_name_it(tmp_path, capsys):
    """On standard error, so that `--json` stays readable; a store without runs is answered with what to do."""
    path = tmp_path / "two.db"
    small_run(path, "older", ["c0", "c1"])
    small_run(path, "newer\x1b[2J", ["c0", "c1"])
    newest = result(capsys, "runs", "--store", path)[0]["id"]
    for verb in ("show", "findings", "profile", "check"):
        _, out, err = run(capsys, verb, "--store", path)
        assert out.strip(), verb
        assert f"No run was named, so this is the newest: newer?[2J, {newest}." in err, verb
    assert result(capsys, "show", "--store", path)["run"]["id"] == newest
    code, out, err = run(capsys, "report", "-o", tmp_path / "report.md", "--store", path)
    assert (code, "report.md" in out, newest in err) == (0, True, True)
    code, _, err = run(capsys, "replay", "--store", path)
    assert code == 2
    assert newest in err
    code, _, err = run(capsys, "replay", "--tape", tmp_path)
    assert (code, "name the run" in err) == (2, True)
    run(capsys, "runs", "delete", newest, "older", "--yes", "--store", path)
    code, _, err = run(capsys, "show", "--store", path)
    assert (code, "no runs yet" in err) == (2, True)


def test_runs_keep_their_columns_in_80_columns(tmp_path, capsys, monkeypatch):
    """Long names are shortened to what differs, ids to a beginning that any verb takes; no line is longer, none wraps.
    In a pipe nothing is cut.
    """
    path = tmp_path / "names.db"
    names = [f"mnist-fedavg-dirichlet0.3-momentum-lr{rate}" for rate in (0.01, 0.1, 1.0)]
    for name in names:
        small_run(path, name, ["c0", "c1"])
    ids = [found["id"] for found in result(capsys, "runs", "--store", path)]
    monkeypatch.delenv("COLUMNS", raising=False)
    _, out, _ = run(capsys, "runs", "--store", path)
    assert all(name in out for name in names + ids)
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "runs", "--store", path)
    head, *lines = out.splitlines()[:4]
    assert head.split() == ["run", "id", "rounds", "clients", "accuracy", "loss", "findings", "time"]
    assert max(map(len, out.splitlines()[:4])) <= 80
    assert [line.split()[0] for line in lines] == ["…lr1.0", "…lr0.1", "…lr0.01"]
    for line, identity in zip(lines, ids, strict=True):
        assert result(capsys, "show", line.split()[1], "--store", path)["run"]["id"] == identity


def test_show_of_a_short_run_with_long_names(tmp_path, capsys, monkeypatch):
    """Names keep the part in which they differ, and one round is too short to judge, as the dashboard says."""
    names = [f"hospital-of-the-university-of-berlin-node-{number:02d}" for number in range(4)]
    small_run(tmp_path / "names.db", "names", names)
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "show", "names", "--store", tmp_path / "names.db")
    rows = [line.split()[0] for line in out.splitlines() if line.startswith("…")]
    assert sorted(rows) == [f"…{number:02d}" for number in range(4)]
    assert "Clients, those that stand out first (4 of 4)" in out
    assert "Health: Too short to judge: 1 round. No findings by" in out
    assert "Layers, those that changed most first" not in out


def test_show_says_what_was_not_measured_and_why(tmp_path, capsys):
    """Without data and loss the fit is absent, and the card says what it needs."""
    small_run(tmp_path / "tiny.db", "tiny", ["c0", "c1"])
    (found,) = result(capsys, "runs", "--store", tmp_path / "tiny.db")
    card = result(capsys, "show", found["id"], "--store", tmp_path / "tiny.db")
    needs = {name: needs for names, needs in card["absent"].items() for name in names.split(", ")}
    assert "`data` that yields (x, y)" in needs["fit.loss_before"]
    assert "gradient.norm" not in needs


def test_show_one_node(store, capsys):
    """A node's history has every metric over the rounds; a wrong name is answered with those that exist."""
    found = result(capsys, "show", "demo", "--node", "c7", "--store", store)
    rounds, values = found["metrics"]["update.norm"]
    assert rounds == [0, 1]
    assert holds_for_each(value > 0 for value in values)
    code, _, err = run(capsys, "show", "demo", "--node", "c77", "--store", store)
    assert code == 2
    assert "Did you mean 'c7'?" in err


def test_query_reads_and_never_writes(store, capsys):
    """SQL on the views; a statement that would change something is refused and changes nothing."""
    answer = result(capsys, "query", "SELECT COUNT(*) AS n FROM metrics WHERE name = 'update.norm'", "--store", store)
    assert answer["rows"] == [{"n": 20}]
    for statement in ("DELETE FROM metric", "DROP TABLE run", "CREATE TABLE x (y)", "nonsense", "", "/* nothing */"):
        code, _, err = run(capsys, "query", statement, "--store", store)
        assert code == 2, statement
        assert err.startswith("fedvitals: ")
    assert result(capsys, "query", "SELECT COUNT(*) AS n FROM metrics WHERE name = 'update.norm'", "--store", store)


def test_query_limits_its_answer(store, capsys):
    """More rows than the limit are not shown, and that is said."""
    code, _, err = run(capsys, "query", "SELECT * FROM metrics", "--limit", "3", "--store", store)
    assert code == 0
    assert "Only the first 3 rows" in err
    for limit in ("0", "-1"):
        code, _, err = run(capsys, "query", "SELECT * FROM metrics", "--limit", limit, "--store", store)
        assert code == 2
        assert f"{limit} is not in the range x>=1" in err


def test_the_choices_of_an_option_are_listed_as_click_does(store, capsys):
    code, _, err = run(capsys, "export", "--store", store)
    assert code == 2
    assert "\n\tperfetto,\n" in err


def test_query_unpacks_layer_statistics(store, capsys):
    """People's SQL sees layer statistics as rows, though they are stored packed."""
    sql = "SELECT layer, l2, mean FROM layer_statistics WHERE family = 'gradient' AND node = 'c7' AND round = 1"
    answer = result(capsys, "query", sql, "--store", store)
    assert {row["layer"] for row in answer["rows"]} == {
        "conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "head.weight", "head.bias",
    }  # fmt: skip
    assert holds_for_each(row["l2"] > 0 for row in answer["rows"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "dmo"], "Did you mean 'demo'?"),
        (["sho", "demo"], "Did you mean 'show'?"),
        (["runs", "--store", "/nowhere/else.db"], "There is no store"),
        (["demo", "--clients", "3"], "at least 8 clients"),
        (["demo", "--rounds", "0"], "at least 1 round"),
        (["bench", "speed"], "kernel"),
    ],
)
def test_wrong_use_is_answered_with_what_exists(store, capsys, monkeypatch, arguments, words):
    """Exit code 2, what was got and what to do, on standard error; no traceback."""
    monkeypatch.setenv("FEDVITALS_STORE", str(store))
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err + out


def test_store_from_the_environment(store, capsys, monkeypatch, tmp_path):
    """FEDVITALS_STORE is the default store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVITALS_STORE", str(store))
    assert len(result(capsys, "runs")) == 1


def test_hostile_names_do_not_reach_the_terminal(tmp_path, capsys, monkeypatch):
    """A name with escape sequences or markup is shown as text."""
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal would shorten the name
    small_run(tmp_path / "hostile.db", "\x1b[31mred[/bold][link=x]", ["c0\x1b[2J", "[red]c1", "c2", "c3"])
    for verb in (["runs"], ["show", "\x1b[31mred[/bold][link=x]"]):
        code, out, _ = run(capsys, *verb, "--store", tmp_path / "hostile.db")
        assert code == 0
        assert "\x1b" not in out
        assert "red" in out


@pytest.mark.thorough
def test_bench_start_prints_a_table(capsys):
    """`fedvitals bench start --quick --json` measures fresh processes."""
    rows = result(capsys, "bench", "start", "--quick")["start"]
    assert {row["what"] for row in rows} == {"python -c pass", "import fedvitals", "fedvitals --help"}
    assert holds_for_each(row["milliseconds"] > 0 for row in rows)
