# SPDX-License-Identifier: Apache-2.0
"""Where a detector failed or records were lost, nobody says that all is well: no verb, page, report or object."""

import json

import pytest

import fedvitals as fv
from fedvitals.dashboard.pages.client import client_verdict
from fedvitals.dashboard.pages.runs import facts_of
from fedvitals.diagnosis.gaps import MonitorFailure, gaps
from fedvitals.errors import RecordError
from fedvitals.records import Event, Metric, Run, Where
from fedvitals.report.write import report
from fedvitals.store import open_reader, open_store
from fedvitals.store.in_memory import MemoryStore
from fedvitals.store.read import queries
from fedvitals.testing import tiny_run
from fedvitals.views.clients import roster
from fedvitals.views.gaps import gaps_of
from fedvitals.views.overview import overview
from fedvitals.views.verdict import Facts, judge, verdict_of
from support.healthy.loops import loops
from support.models import mlp
from support.store_contract import stats
from support.verbs import run

ALL_CLEAR = ("No findings by", "nothing found", "Healthy", "healthy", "Nothing is wrong", "No findings.")


def quiet(history, number):
    yield from ()


def broken(history, number):
    if number >= 1:
        raise TypeError("expected string or bytes-like object, got 'int'")
    yield from ()


def train(store, *, rounds=4, detectors=(quiet, broken, quiet), **more):
    monitor = fv.Monitor(store, "sick", detectors=list(detectors), machine=False, probes="light", **more)
    for number in range(rounds):
        with monitor.round(number, mlp()):
            for client in range(3):
                with monitor.client(client, mlp()):
                    pass
    return monitor


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("gaps") / "runs.db"
    train(path).close()
    return path


def test_a_detector_that_fails_is_named_and_the_others_go_on():
    looked = []

    def looking(history, number):
        looked.append(number)
        yield from ()

    monitor = train(None, detectors=[broken, looking])
    text = str(monitor.findings())
    monitor.close()
    assert looked == [0, 1, 2, 3]
    assert text == repr(monitor.findings())
    assert text.startswith("No findings, but not fully examined: the detector 'broken' failed in round ")
    assert text.endswith(" (TypeError).")
    assert monitor.lost == 0


@pytest.mark.thorough
def test_a_model_that_a_probe_refuses_is_judged_all_the_same():
    """Gradient scale is for classifiers; a language model gives a row of numbers for each token."""
    monitor = fv.Monitor(None, machine=False)
    loops()["language model"](monitor, 0)
    found = monitor.findings()
    monitor.close()
    assert found.gaps == ()


def test_findings_with_gaps_say_so_below():
    found = fv.Monitor(None, detectors=[quiet], machine=False).findings()
    assert str(found) == "No findings by 1 detector."
    assert found.gaps == ()


def test_what_a_users_detector_yields_harms_nobody(caplog):
    def odd(history, number):
        yield "not a finding"

    monitor = train(None, rounds=2, detectors=[odd, quiet])
    assert "taking a finding failed" in str(monitor.findings())
    monitor.close()


@pytest.mark.parametrize("verb", ["findings", "check"])
def test_verbs_that_judge_give_no_all_clear(store, capsys, verb, monkeypatch):
    if verb == "check":
        monkeypatch.setattr("fedvitals.diagnosis.examine.DETECTORS", (quiet, broken))
    code, out, _ = run(capsys, verb, "sick", "--store", store)
    assert code == 1
    assert "not fully examined: the detector 'broken' failed" in out.replace("\n", " ")
    assert not any(words in out for words in ALL_CLEAR)
    code, out, _ = run(capsys, verb, "sick", "--store", store, "--json")
    assert code == 1
    assert json.loads(out)["result"]["not_judged"]


def test_looking_again_gives_no_all_clear_for_what_was_never_recorded(tmp_path, capsys):
    """Rounds that could not be opened are not in the store, so `check` cannot judge them either."""
    with fv.Monitor(tmp_path / "runs.db", "named", machine=False, probes="light") as monitor:
        for number in range(2):
            with monitor.round(f"round {number}", mlp()), monitor.client("c0", mlp()):
                pass
    for verb in ("findings", "check"):
        code, out, _ = run(capsys, verb, "named", "--store", tmp_path / "runs.db")
        assert code == 1
        assert "not fully examined: opening a round failed" in out.replace("\n", " ")


def test_verbs_that_show_give_no_all_clear(store, capsys):
    code, out, _ = run(capsys, "show", "sick", "--store", store)
    assert code == 0
    assert "not fully examined: the detector 'broken' failed" in out
    assert not any(words in out for words in ALL_CLEAR)
    code, out, _ = run(capsys, "runs", "--store", store)
    assert code == 0
    assert "not fully examined" in out
    (listed,) = json.loads(run(capsys, "runs", "--store", store, "--json")[1])["result"]
    assert listed["not_judged"]


@pytest.mark.thorough
def test_pages_and_reports_give_no_all_clear(store, tmp_path):
    with open_reader(store) as reader:
        (summary,) = queries.list_runs(reader)
        verdict = verdict_of(reader, summary.id)
        assert verdict.state == "unjudged"
        assert "not fully examined: the detector 'broken' failed" in verdict.headline
        assert overview(reader, summary.id).verdict == verdict
        assert facts_of(reader, summary.id).verdict.state == "unjudged"
        assert gaps_of(reader, summary.id)
        for name in ("report.md", "report.html"):
            report(reader, [summary.id], tmp_path / name)
            text = (tmp_path / name).read_text(encoding="utf-8")
            assert "not fully examined" in text
            assert "Nothing needs doing" not in text
            assert "Healthy" not in text


@pytest.mark.thorough
def test_records_lost_are_told_in_the_store_and_nobody_gives_an_all_clear(tmp_path, capsys):
    """Lost after the last round: payloads of workers that cannot be read."""
    store = tmp_path / "runs.db"
    monitor = train(store, detectors=[quiet])
    for _ in range(2):
        monitor.host.absorb(b"no payload")
    monitor.close()
    assert monitor.lost == 2
    assert "2 records were lost" in str(monitor.findings())
    code, out, _ = run(capsys, "show", "sick", "--store", store)
    assert code == 0
    assert "lost: 2 records" in out
    assert "2 records were lost" in " ".join(out.split())
    code, out, _ = run(capsys, "findings", "sick", "--store", store)
    assert code == 1
    assert not any(words in out for words in ALL_CLEAR)
    with open_reader(store) as reader:
        (event,) = reader.history(monitor.run.id).events("telemetry.lost")
        assert event.data == {"records": 2}
        assert "workers: 2" in event.message


@pytest.mark.thorough
def test_a_store_that_could_not_be_written_gets_later_what_waited(tmp_path, monkeypatch):
    path = tmp_path / "runs.db"
    tiny_run(path, strict=True)
    monitor = train(path, rounds=2, detectors=[quiet])
    monitor.flush()
    monkeypatch.setattr("fedvitals.store.sqlite.SqliteStore.write", _refuse)
    with monitor.round(2, mlp()), monitor.client("c0", mlp()):
        pass
    monitor.close()
    monkeypatch.undo()
    assert monitor.lost == 0
    with open_reader(path) as reader:
        assert "wait beside the store" in gaps_of(reader, monitor.run.id)[-1]
    tiny_run(path, strict=True)  # takes back what waited
    with open_reader(path) as reader:
        assert gaps_of(reader, monitor.run.id) == ()
        assert 2 in queries.attendance(reader, monitor.run.id, ["c0"])["c0"]


@pytest.mark.thorough
def test_a_store_that_could_not_be_written_tells_later_what_was_lost(tmp_path, monkeypatch):
    path = tmp_path / "runs.db"
    monkeypatch.setattr("fedvitals.transport.queue.BULK_BYTES", -1)  # no room on the disk
    tiny_run(path, strict=True)
    monitor = train(path, rounds=2, detectors=[quiet])
    monitor.flush()
    monkeypatch.setattr("fedvitals.store.sqlite.SqliteStore.write", _refuse)
    with monitor.round(2, mlp()), monitor.client("c0", mlp()):
        pass
    monitor.close()
    monkeypatch.undo()
    assert monitor.lost > 0
    with open_reader(path) as reader:
        assert "wait beside the store" in gaps_of(reader, monitor.run.id)[-1]
    tiny_run(path, strict=True)  # takes back what waited
    with open_reader(path) as reader:
        assert queries.left_out(reader, monitor.run.id)[0] == monitor.lost
        assert gaps_of(reader, monitor.run.id) == (f"{monitor.lost} records were lost",)


def _refuse(self, records, /):
    raise OSError("no room")


def test_each_process_counts_its_own_losses(tmp_path):
    path = tmp_path / "runs.db"
    with open_store(path) as store:
        counts = [("a", 1, 2.0), ("a", 2, 5.0), ("b", 1, 3.0)]
        counted = [Metric(Where("r", n), float(n), "monitor.lost", value, source, n) for source, n, value in counts]
        late = Event(Where("r"), 9.0, "warning", "telemetry.lost", "", {"records": 7}, "b", 9)
        theirs = [  # of a client that may lie
            Metric(Where("r", 1, "c1"), 1.0, "monitor.lost", float("inf"), "c1", 1),
            Event(Where("r", 1, "c1"), 1.0, "warning", "telemetry.lost", "", {"records": "many"}, "c1", 2),
        ]
        store.write([Run("r", "run"), *counted, late, *theirs])
    with open_reader(path) as reader:
        assert queries.summary_of(reader, "r").lost == queries.left_out(reader, "r")[0] == 12


def test_a_record_that_cannot_be_kept_costs_the_detectors_only_itself():
    memory = MemoryStore()
    good = [stats(0, f"c{i}", 1, i + 1) for i in range(3)]
    bad = stats(0, "c9", 1, 9)
    object.__setattr__(bad.where, "round", "zero")
    with pytest.raises(RecordError, match="1 of 5 records cannot be kept"):
        memory.write([good[0], bad, *good[1:], Metric(Where("r-1", 0, "c0"), 0.0, "loss", 1.0, "m", 10)])
    assert memory.history("r-1").latest("loss", 0) == {"c0": 1.0}


def test_words():
    failed = [MonitorFailure(f"the detector 'd{i}'", "TypeError", 3) for i in range(5)]
    assert gaps([], 0) == ()
    assert gaps([MonitorFailure("taping a round", "OSError", 1), MonitorFailure("log()", "ValueError")], 0) == ()
    assert gaps([MonitorFailure("the probe 'scale'", "ConfigError", 0, "c0")], 0) == ()  # no detector looks at it
    assert gaps(failed[:1], 577) == ("the detector 'd0' failed in round 3 (TypeError)", "577 records were lost")
    assert gaps(failed, 1)[-2:] == ("2 detectors failed, too", "1 record was lost")
    theirs = [MonitorFailure("<b>anything</b>", "x" * 999, 1, f"c{i}") for i in (10, 2, 1, 3)]
    assert gaps(theirs, 0) == ("what was measured of c1, c2, c3 and 1 more is incomplete",)


def test_a_verdict_with_gaps():
    facts = Facts(rounds=40, clients=10, detectors=34, gaps=("577 records were lost",))
    verdict = judge([], facts)
    assert (verdict.state, verdict.headline) == (
        "unjudged",
        "No findings, but not fully examined: 577 records were lost.",
    )


def test_a_client_of_such_a_run_is_not_called_healthy(store):
    with open_reader(store) as reader:
        (summary,) = queries.list_runs(reader)
        rows = roster(reader, summary.id).rows
        facts = Facts(rounds=4, clients=3, detectors=3, gaps=gaps_of(reader, summary.id))
        assert {client_verdict(row, [], facts).state for row in rows} <= {"unjudged", "different", "warming"}
