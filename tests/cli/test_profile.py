# SPDX-License-Identifier: Apache-2.0
"""`fedvitals profile`: where the time, the memory and the bytes went, of runs whose every second is known."""

import dataclasses
import json
import subprocess
import sys

import pytest

from fedvitals.records import Event, Metric, Span, Transfer, Where
from support.timed_run import BYTES, begin, stored
from support.verbs import result, run

CLIENTS = {"c0": (1.0, 2.0, 1.0), "c1": (1.0, 2.0, 1.0), "c2": (1.0, 2.0, 1.0), "c7": (1.0, 2.0, 9.0)}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Four rounds of 12.5 s: c7 uploads for 9 s, c2 is away once; the last round is the longest."""
    told = begin("r1", "known")
    for number in range(4):
        clients = {**CLIENTS, "c2": None} if number == 1 else dict(CLIENTS)
        clients["c7"] = (1.0, 2.0, 10.0) if number == 3 else CLIENTS["c7"]
        told.round(clients, accuracy=0.2 + 0.2 * number)
        spot = Where("r1", number, "c0")
        for name, value in (("throughput.samples", 50.0), ("samples", 100.0), ("memory.resident", 1e6 + 1e5 * number),
                            ("memory.tensors", 300.0), ("memory.model", 100.0), ("memory.activations", 200.0),
                            ("machine.cpu", 40.0), ("gpu.utilisation", 90.0)):  # fmt: skip
            told.add(Metric(spot, told.at, name, value))
    rows = [{"name": "aten::conv2d", "calls": 3, "seconds": 0.25, "device_seconds": 0.0, "bytes": 4096}]
    told.add(Event(Where("r1", 2, "c0"), told.at, "info", "profile.operators", "", {"operators": rows}))
    empty = begin("r2", "untimed")
    return stored(tmp_path_factory.mktemp("profile") / "runs.db", told, empty)


def test_names_who_holds_the_rounds_up(store, capsys):
    found = result(capsys, "profile", "known", "--store", store)
    assert (found["clock"], found["verdict"]["kind"]) == ("virtual", "straggler")
    assert found["verdict"]["stragglers"] == ["c7"]
    assert found["stragglers"][0]["node"] == "c7"
    assert found["rounds"][0]["seconds"] == 12.5
    assert found["rounds"][0]["without"] == pytest.approx(4.5)
    assert found["remedies"]


def test_parts_sum_to_the_rounds(store, capsys):
    """Along the critical path 12.5 s three times and 13.5 s once; each client's parts are the round's length."""
    found = result(capsys, "profile", "known", "--store", store)
    assert sum(found["path_parts"].values()) == pytest.approx(51.0)
    assert found["path_parts"]["upload"] == pytest.approx(37.0)
    for one in found["times"]:
        for node in one["nodes"].values():
            assert sum(node["parts"].values()) == pytest.approx(one["seconds"])


def test_the_longest_round_is_shown_unless_told(store, capsys):
    assert result(capsys, "profile", "known", "--store", store)["waterfall"]["round"] == 3
    found = result(capsys, "profile", "known", "--round", "1", "--store", store)
    assert found["path"]["text"].startswith("round 1 took 12.5 s: c7's upload, 9")
    assert {one["part"] for one in found["waterfall"]["intervals"] if one["node"] == "c2"} == {"away"}


def test_report_opens_with_the_verdict_and_shows_a_waterfall(store, capsys, monkeypatch):
    """In an order that a reader can rely on, no line wider than the terminal, and c7's upload as letters."""
    for columns in (80, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        code, out, _ = run(capsys, "profile", "known", "--store", store)
        assert code == 0
        titles = ("straggler-bound", "Where the time went", "Rounds 0 to 3", "Round 3 took", "Stragglers",
                  "What would help", "What if", "Throughput", "Memory", "Machines", "Operators", "Traffic",
                  "Who was away", "accuracy not reached")  # fmt: skip
        places = [out.index(title) for title in titles]
        assert places == sorted(places)
        assert max(map(len, out.splitlines())) <= columns
        (line,) = [line for line in out.splitlines() if line.startswith("▸ c7")]
        bar = line.split()[2]
        assert bar.count("U") / len(bar) == pytest.approx(10 / 13.5, abs=0.05)
        assert bar.startswith("D")


def test_costs_are_those_of_the_records(store, capsys):
    found = result(capsys, "profile", "known", "--store", store)
    (pace,) = found["throughput"]
    assert (pace["node"], pace["samples_per_second"], pace["epoch_seconds"]) == ("c0", 50.0, 2.0)
    peaks = {one["metric"]: one for one in found["memory"]["peaks"]}
    assert (peaks["memory.resident"]["bytes"], peaks["memory.resident"]["growth_bytes"]) == (1.3e6, pytest.approx(3e5))
    assert found["memory"]["shares"] == {"model": 100.0, "activations": 200.0}
    assert {one["metric"]: one["extreme"] for one in found["machine"]} == {"machine.cpu": 40.0, "gpu.utilisation": 90.0}
    assert found["operators"][0]["data"]["operators"][0]["name"] == "aten::conv2d"
    assert found["traffic"]["bytes"] == 15 * 2 * BYTES
    away = next(one for one in found["traffic"]["clients"] if one["node"] == "c2")
    assert (away["availability"], away["failure_rate"]) == (0.75, 0.0)


def test_what_it_took_and_what_was_not_reached(store, capsys):
    """0.8 in the fourth round: 51 virtual and 1 real second; 0.9 never."""
    low, middle, _ = result(capsys, "profile", "known", "--store", store)["reached"]
    assert (low["rounds"], low["virtual_seconds"], low["seconds"]) == (4, 51.0, 1.0)
    assert (middle["round"], middle["best"]) == (None, pytest.approx(0.8))


def test_the_bandwidth_for_a_target(store, capsys):
    """c7 moves two models in what 4.5 s leave after 2 s of computing and half a second of the server's."""
    found = result(capsys, "profile", "known", "--target", "4.5", "--store", store)
    needs = {one["node"]: one for one in found["needed"]}
    assert needs["c7"]["bits_per_second"] == pytest.approx(8 * 2 * BYTES / 2.0)
    assert needs["c7"]["now_bits_per_second"] == pytest.approx(8 * 2 * BYTES / 10.0)


def test_both_clocks_and_groups(tmp_path, capsys):
    """The virtual clock where there is one; --clock chooses; edges stand between server and clients."""
    told = begin("r1", "both", topology="hierarchical")
    groups = {"c0": "edge-0", "c1": "edge-0", "c2": "edge-1", "c7": "edge-1"}
    told.round(CLIENTS, groups=groups)
    told.rounds = 0
    told.round({"c0": (0.0, 1.0, 0.0)}, clock="real")
    path = stored(tmp_path / "runs.db", told)
    found = result(capsys, "profile", "both", "--store", path)
    assert (found["clock"], found["clocks"]) == ("virtual", ["real", "virtual"])
    assert {"edge-0", "edge-1"} <= set(found["times"][0]["nodes"])
    assert found["traffic"]["retries"] is None
    assert result(capsys, "profile", "both", "--clock", "real", "--store", path)["rounds"][0]["seconds"] == 1.5
    code, out, _ = run(capsys, "profile", "both", "--store", path)
    assert code == 0
    assert "--clock real" in " ".join(out.split())


def test_names_of_nodes_move_no_cursor(tmp_path, capsys):
    """A client may call itself what it likes; the terminal shows it, and does nothing else."""
    told = begin("r1", "hostile")
    told.round({"c0": (1.0, 1.0, 1.0), "\x1b[2J[red]x": (1.0, 1.0, 9.0), "c2": (1.0, 1.0, 1.0)})
    code, out, _ = run(capsys, "profile", "hostile", "--store", stored(tmp_path / "runs.db", told))
    assert code == 0
    assert "\x1b[2J" not in out
    assert "[red]x" in out


def test_a_run_without_times_is_told_as_such(store, capsys):
    code, out, _ = run(capsys, "profile", "untimed", "--store", store)
    assert code == 0
    assert "No round of this run was timed" in out
    assert result(capsys, "profile", "untimed", "--store", store)["verdict"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["known", "--round", "9"], "Rounds 0 to 3 are timed"), (["known", "--clock", "real"], "no real clock"),
     (["knwon"], "Did you mean 'known'?")],
)  # fmt: skip
def test_wrong_use_is_told(store, capsys, arguments, words):
    code, _, err = run(capsys, "profile", *arguments, "--store", store)
    assert code == 2
    assert words in err


@pytest.mark.thorough
def test_loads_no_torch(store):
    """A report on an aggregator's or a colleague's machine."""
    code = (
        "import sys\nfrom fedvitals.cli.main import app\n"
        f"for verb in (['profile', 'known'], ['compare', 'known', 'untimed']):\n"
        f"    app.main([*verb, '--store', {str(store)!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def shown_of(capsys, path, name, *more):
    code, out, _ = run(capsys, "profile", name, *more, "--store", path)
    assert code == 0
    return out


def line_of(out, begins):
    return next(line for line in out.splitlines() if line.startswith(begins))


def test_one_client_has_no_others(tmp_path, capsys):
    told = begin("r1", "alone")
    for _ in range(3):
        told.round({"c": (1.0, 2.0, 1.0)})
    out = shown_of(capsys, stored(tmp_path / "runs.db", told), "alone")
    assert "3 rounds of 4.5 s, 1 client," in out
    assert "without c" not in out
    assert "others" not in out
    assert line_of(out, "Rounds 0 to 2").endswith("4.5 s each")
    assert line_of(out, "  path").endswith("4.5 s")  # not cut, though the name is shorter than «path»


def test_the_round_that_an_open_run_did_not_end_is_left_out(tmp_path, capsys):
    told = begin("r1", "open")
    told.records[0] = dataclasses.replace(told.records[0], finished=None)
    for _ in range(2):
        told.round(CLIENTS)
    parts = {"download": 1.0, "compute": 70.0}
    told.add(Span(Where("r1", 2, "c0"), told.at, "journey", 71.0, "t" * 32, "x", None, {"clock": "virtual",
                                                                                        "parts": parts}))  # fmt: skip
    path = stored(tmp_path / "runs.db", told)
    out = shown_of(capsys, path, "open")
    assert "The run is still open, or was killed. Round 2 has no end and is left out." in out
    assert "Rounds 0 to 1" in out
    assert "71" not in out
    found = result(capsys, "profile", "open", "--store", path)
    assert (found["left_open"], [one["round"] for one in found["times"]]) == (2, [0, 1])


@pytest.mark.parametrize("telemetry", [0, 26_600])
def test_a_run_that_told_of_no_transfer(tmp_path, capsys, telemetry):
    """No share of nothing, no layers of it, and a word why no bandwidth is known for a target."""
    told = begin("r1", "quiet")
    told.round(CLIENTS)
    told.records = [one for one in told.records if not isinstance(one, Transfer)]
    if telemetry:
        told.add(Transfer(Where("r1", 0, "c0"), told.at, "c0", "server", telemetry, telemetry, None, "telemetry"))
    path = stored(tmp_path / "runs.db", told)
    out = shown_of(capsys, path, "quiet", "--target", "3")
    assert "Traffic  no models and updates were recorded" in out
    assert "by layer" not in out
    assert "1e+02" not in out
    assert ("26.6 kB  fedvitals' own" in out) == bool(telemetry)
    assert "Bandwidth  not known which one a target needs: no transfers were recorded." in out
    assert "Bandwidth" not in shown_of(capsys, path, "quiet")


def test_ids_of_runs_move_no_cursor(tmp_path, capsys):
    told = begin("\x1b[2Jr[red]1", "odd")
    told.round(CLIENTS)
    path = stored(tmp_path / "runs.db", told, begin("\x1b[2Jr2", "empty"))
    for words, judged in (
        (["profile", "odd"], 0),
        (["profile", "empty"], 0),
        (["show", "odd"], 0),
        (["findings", "odd"], 1),
    ):
        code, out, _ = run(capsys, *words, "--store", path)
        assert (code, "\x1b[2J" in out) == (judged, False)  # no detector looked at this run


def test_whose_memory_grew_and_the_same_figure_in_compare(tmp_path, capsys):
    """c0 is the largest and grows by 1 MB; c1 grows by 30, 20 of them in round 2, and keeps most of it."""
    grew = {"c0": [0.5e6, 0.5e6, 0.0], "c1": [5e6, 5e6, 20e6]}
    told = begin("r1", "grows")
    for number in range(3):
        told.round({"c0": (1.0, 2.0, 1.0), "c1": (1.0, 2.0, 1.0)})
        for node, base in (("c0", 500e6), ("c1", 100e6)):
            values = {"growth": grew[node][number], "kept": 0.9 * grew[node][number],
                      "resident": base + sum(grew[node][1 : number + 1])}  # fmt: skip
            for name, value in values.items():
                told.add(Metric(Where("r1", number, node), told.at, f"memory.{name}", value))
    path = stored(tmp_path / "runs.db", told, begin("r2", "other"))
    memory = result(capsys, "profile", "grows", "--store", path)["memory"]
    resident = next(one for one in memory["peaks"] if one["metric"] == "memory.resident")
    assert (resident["node"], resident["growth_node"], resident["growth_bytes"]) == ("c0", "c1", 25e6)
    assert (memory["grown"][0]["node"], memory["grown"][0]["bytes"], memory["grown"][0]["most_round"]) == (
        "c1",
        30e6,
        2,
    )
    code, out, _ = run(capsys, "compare", "grows", "other", "--store", path, "--json")
    rows = {row["name"]: row["values"][0] for row in json.loads(out)["result"]["rows"]}
    assert (code, rows["growth over the run"]) == (0, 25e6)
    out = shown_of(capsys, path, "grows")
    assert "memory.kept" not in out
    assert " ".join(line_of(out, "  grew most with").split()).endswith(
        "30 MB c1, over 3 rounds; 20 MB of it in round 2"
    )
    assert "c1, a round on average; the next is c0" in line_of(out, "  heap kept most by")


def test_the_pace_of_the_real_machine_is_labelled(store, capsys):
    assert line_of(shown_of(capsys, store, "known"), "Throughput").endswith("(of this machine, real clock)")


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_who_was_waited_for(tmp_path, capsys, clock):
    """Three clients wait for c7, 8 s each in every round, on either clock; c7 for half a second of the server's."""
    told = begin("r1", "waits")
    for _ in range(2):
        told.round(CLIENTS, clock=clock)
    path = stored(tmp_path / "runs.db", told)
    found = result(capsys, "profile", "waits", "--store", path)
    assert found["clock"] == clock
    assert found["waiting"]["lost"] == {"c7": pytest.approx(16.0)}
    assert {found["waits"][node] for node in ("c0", "c1", "c2")} == {"c7"}
    out = shown_of(capsys, path, "waits")
    assert "Rounds 0 to 1 waited 16 s for c7 (" in out
    assert "waits: 4 nodes for c7; c7 for server" in out


def test_measuring_on_the_critical_path_is_told_apart(tmp_path, capsys):
    told = begin("r1", "measured")
    for _ in range(3):
        number = told.round({"c0": (0.0, 2.0, 0.0)}, clock="real")
        spot, at = Where("r1", number, "c0"), told.at - 2.5
        parts = {"forward": 1.0, "backward": 0.8, "measure": 0.2}
        told.add(Span(spot, at, "client", 2.0, "t" * 32, f"m{number}", None, {"parts": parts, "folded": True}))
    out = shown_of(capsys, stored(tmp_path / "runs.db", told), "measured")
    assert "8 % of the critical path is measuring by fedvitals" in out
