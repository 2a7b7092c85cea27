# SPDX-License-Identifier: Apache-2.0
"""Delivery: at most once, in spite of servers that fail and processes that die, and never in training's way."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading

import pytest

from fedvitals.diagnosis.issues.table import ISSUES
from fedvitals.records import Finding, Metric, Where
from fedvitals.sinks.alerts import delivery as alert_delivery
from fedvitals.sinks.alerts import outbox as alert_outbox
from fedvitals.sinks.alerts.delivery import ChannelDelivery
from fedvitals.sinks.alerts.outbox import Outbox, path_in
from fedvitals.sinks.alerts.sink import Alerts, File, Webhook
from support.alert_servers import HttpServer, alert, running, unused_port
from support.paths import ROOT, TESTS
from support.waiting import PATIENCE, wait_until


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The same waits, a hundred times shorter."""
    monkeypatch.setattr(alert_delivery, "LINGER_SECONDS", 0.02)
    monkeypatch.setattr(alert_delivery, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(alert_delivery, "LONGEST_DELAY", 0.1)


def ask(folder, sql):
    with contextlib.closing(sqlite3.connect(path_in(folder), timeout=PATIENCE)) as database, database:
        return database.execute(sql).fetchall()


def states(folder):
    return dict(ask(folder, "SELECT state, COUNT(*) FROM delivery GROUP BY state"))


def ended(delivery, timeout=PATIENCE):
    delivery.stop(timeout)
    delivery.join()


def test_many_at_once_are_one_message(tmp_path):
    """The alerts of a moment travel together; alerts of another run do not."""
    with running(HttpServer()) as server:
        delivery = ChannelDelivery(Webhook(server.url), tmp_path)
        for number in range(5):
            delivery.put(alert(number))
        delivery.put(alert(9, run="r2"))
        assert delivery.flush()
        ended(delivery)
        assert [len(body["fedvitals"]["alerts"]) for body in server.bodies] == [5, 1]
        single = ChannelDelivery(Webhook(server.url, name="single"), tmp_path, group=False)
        for number in range(3):
            single.put(alert(number))
        ended(single)
        assert [len(body["fedvitals"]["alerts"]) for body in server.bodies[2:]] == [1, 1, 1]


def test_an_outage_is_waited_out(tmp_path, caplog):
    """500, 503, then 200: one message taken, nothing lost, one line in the log for each cause."""
    with running(HttpServer(500, 503, 500, 200)) as server:
        delivery = ChannelDelivery(Webhook(server.url), tmp_path)
        delivery.put(alert())
        wait_until(lambda: delivery.sent == 1)
        ended(delivery)
    assert len(server.requests) == 4
    assert len({headers["Idempotency-Key"] for _, headers, _ in server.requests}) == 1
    assert delivery.lost == {}
    assert states(tmp_path) == {"sent": 1}
    assert [record.message.count("answered") for record in caplog.records] == [1, 1]


@pytest.mark.thorough
@pytest.mark.parametrize(("word", "seconds"), [("hang", 1.5), ("die", PATIENCE)])
def test_what_may_have_arrived_is_not_repeated(tmp_path, word, seconds):
    """It is counted, told in the next message, and sent again only where the channel asks for that."""
    with running(HttpServer(word, 200)) as server:
        delivery = ChannelDelivery(Webhook(server.url, seconds=seconds), tmp_path)
        delivery.put(alert(1))
        wait_until(lambda: delivery.lost == {"in doubt": 1})
        delivery.put(alert(2))
        wait_until(lambda: delivery.sent == 1)
        ended(delivery)
    first, second = (body["fedvitals"] for body in server.bodies)
    assert [one["round"] for one in second["alerts"]] == [2]
    assert (first["doubtful"], second["doubtful"]) == (0, 1)
    assert states(tmp_path) == {"doubt": 1, "sent": 1}
    with running(HttpServer(word, 200)) as server:
        delivery = ChannelDelivery(Webhook(server.url, "again", again=True, seconds=seconds), tmp_path)
        delivery.put(alert(1))
        wait_until(lambda: server.requests)
        delivery.put(alert(2))
        wait_until(lambda: delivery.sent == 2)
        ended(delivery)
    keys = [headers["Idempotency-Key"] for _, headers, _ in server.requests]
    assert (len(keys), len(set(keys)), delivery.lost) == (3, 2, {})  # not mixed with what is new


def test_a_refusal_is_final(tmp_path):
    """404 does not get better by asking again."""
    with running(HttpServer(404)) as server:
        delivery = ChannelDelivery(Webhook(server.url), tmp_path)
        delivery.put(alert())
        wait_until(lambda: delivery.lost == {"refused": 1})
        ended(delivery)
    assert len(server.requests) == 1
    assert states(tmp_path) == {"lost": 1}


def test_a_channel_that_hangs_delays_no_other(tmp_path):
    """Each has its own thread; and neither `write` nor `close` waits for a server."""
    with running(HttpServer("hang")) as hanging, running(HttpServer()) as quick:
        channels = [Webhook(hanging.url, "slow", seconds=PATIENCE), Webhook(quick.url, "quick")]
        alerts = Alerts(rules=["loss > 1"], channels=channels, folder=tmp_path)
        alerts.write([Metric(Where("r1", 0, "c1"), 1.0, "loss", 5.0), Metric(Where("r1", 0), 1.0, "time.round", 1.0)])
        wait_until(lambda: quick.requests and hanging.requests)
        alerts.close(timeout=0.1)
        assert states(tmp_path) == {"sent": 1, "sending": 1}
        hanging.free.set()
        wait_until(lambda: not any(t.name == "fedvitals-alerts-slow" for t in threading.enumerate()))
    assert states(tmp_path) == {"sent": 1, "doubt": 1}


def test_what_waits_survives_the_process(tmp_path):
    """A server that is down keeps nobody; the next process delivers, once, and knows what was delivered before."""
    url = f"http://127.0.0.1:{unused_port()}/"
    delivery = ChannelDelivery(Webhook(url, "hook", label="the same"), tmp_path)
    delivery.put(alert(1))
    delivery.put(alert(2))
    ended(delivery)
    assert states(tmp_path) == {"waiting": 2}
    with running(HttpServer()) as server:
        later = ChannelDelivery(Webhook(server.url, "hook", label="the same"), tmp_path)
        later.start()
        wait_until(lambda: later.sent == 2)
        later.put(alert(1))  # the same alert, made again
        later.put(alert(1, kind="resolved"))
        ended(later)
        other = ChannelDelivery(Webhook(server.url, "hook", label="another"), tmp_path)
        other.start()
        ended(other)
    assert [[one["kind"] for one in body["fedvitals"]["alerts"]] for body in server.bodies] == [
        ["firing"] * 2,
        ["resolved"],
    ]
    assert oct(path_in(tmp_path).stat().st_mode & 0o777) == "0o600"


CHILD = """
    import sys, time
    sys.path[:0] = [{tests!r}]
    from support.alert_servers import alert
    from fedvitals.sinks.alerts import delivery as alert_delivery
    from fedvitals.sinks.alerts.delivery import ChannelDelivery
    from fedvitals.sinks.alerts.sink import Webhook

    alert_delivery.LINGER_SECONDS = 0.02
    alert_delivery.FIRST_DELAY = alert_delivery.LONGEST_DELAY = 60
    delivery = ChannelDelivery(Webhook({url!r}, "hook", label="the same", seconds=30), {folder})
    for number in range(3):
        delivery.put(alert(number))
    delivery.flush(100)
    print("there", flush=True)
    time.sleep(600)
"""


def killed_child(url, folder, until):
    """A process that puts three alerts, and is killed by SIGKILL as soon as `until()` holds."""
    code = textwrap.dedent(CHILD).format(
        tests=str(TESTS), url=url, folder=f"__import__('pathlib').Path({str(folder)!r})"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    try:
        wait_until(until)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()


@pytest.mark.thorough
def test_kill_9_between_the_disk_and_the_server(tmp_path):
    """Written down and not yet sent: the next process sends all three, once."""

    def tried_and_waiting():
        with contextlib.suppress(sqlite3.OperationalError):  # not there yet
            return ask(tmp_path, "SELECT COUNT(*) FROM delivery WHERE state = 'waiting' AND attempts = 1") == [(3,)]

    killed_child(f"http://127.0.0.1:{unused_port()}/", tmp_path, tried_and_waiting)
    ask(tmp_path, "UPDATE delivery SET due = 0")  # else the back-off of the dead is kept
    with running(HttpServer()) as server:
        for _ in range(2):
            delivery = ChannelDelivery(Webhook(server.url, "hook", label="the same"), tmp_path)
            delivery.start()
            delivery.flush()
            ended(delivery)
    assert [len(body["fedvitals"]["alerts"]) for body in server.bodies] == [3]
    assert states(tmp_path) == {"sent": 3}


@pytest.mark.thorough
def test_kill_9_while_the_server_has_it(tmp_path, monkeypatch):
    """It may have arrived: it is not sent again, and the next message says that there was something."""
    with running(HttpServer("hang")) as server:
        killed_child(server.url, tmp_path, lambda: server.requests)
    assert states(tmp_path) == {"sending": 3}
    with running(HttpServer()) as server:
        delivery = ChannelDelivery(Webhook(server.url, "hook", label="the same"), tmp_path)
        delivery.start()
        delivery.flush()
        assert delivery.lost == {}  # its sender might live, as long as the lease runs
        ask(tmp_path, "UPDATE delivery SET due = 0")
        delivery.put(alert(9))
        wait_until(lambda: delivery.sent == 1)
        ended(delivery)
    assert delivery.lost == {"in doubt": 3}
    (body,) = server.bodies
    assert [one["round"] for one in body["fedvitals"]["alerts"]] == [9]
    assert body["fedvitals"]["doubtful"] == 3


def test_two_processes_share_an_outbox(tmp_path):
    """What one has claimed the other does not get."""
    one, other = Outbox(tmp_path, "x"), Outbox(tmp_path, "x")
    one.add([alert(n) for n in range(4)])
    assert other.add([alert(0)]) == 0
    claimed = [*one.claim(2, 1.0), *other.claim(10, 1.0)]
    assert sorted(a.onset for a in claimed) == [0, 1, 2, 3]
    assert one.claim(10, 1.0) == other.claim(10, 1.0) == []
    for box in (one, other):
        box.close()


def test_nothing_grows_without_end(tmp_path, monkeypatch):
    """Neither the line in memory, nor what waits on disk, nor what is long done; each loss is counted by its cause."""
    monkeypatch.setattr(alert_outbox, "MOST_WAITING", 3)
    monkeypatch.setattr(alert_delivery, "QUEUE", 5)
    delivery = ChannelDelivery(Webhook(f"http://127.0.0.1:{unused_port()}/"), tmp_path)
    monkeypatch.setattr(delivery, "start", lambda: None)
    for number in range(8):
        delivery.put(alert(number))
    assert delivery.lost == {"queue full": 3}
    monkeypatch.undo()
    monkeypatch.setattr(alert_outbox, "MOST_WAITING", 3)
    delivery.start()
    delivery.flush()
    ended(delivery)
    assert delivery.lost == {"queue full": 3, "outbox full": 2}
    monkeypatch.setattr(alert_outbox, "KEPT_SECONDS", -1.0)
    box = Outbox(tmp_path, delivery._channel.identity)
    assert box.expire(-1.0, again=False) == (3, 0)
    Outbox(tmp_path, "x").close()
    box.close()
    assert states(tmp_path) == {}


def test_without_a_folder_it_still_delivers(tmp_path, caplog):
    """In memory, or where the folder cannot be made; what is left at the end is told as lost."""
    (tmp_path / "file").write_text("")
    with running(HttpServer()) as server:
        for folder in (None, tmp_path / "file" / "folder"):
            delivery = ChannelDelivery(Webhook(server.url), folder)
            delivery.put(alert())
            ended(delivery)
    assert len(server.requests) == 2
    assert "would not survive a restart" in caplog.text
    delivery = ChannelDelivery(Webhook(f"http://127.0.0.1:{unused_port()}/"), None)
    delivery.put(alert())
    ended(delivery)
    assert delivery.lost == {"not delivered by the end of the run": 1}


def test_a_broken_outbox_and_a_broken_channel(tmp_path, caplog):
    """The file is spoilt: memory takes over. A channel that raises anything is in doubt, and not called again."""
    path_in(tmp_path).write_bytes(b"no database" * 500)

    class Odd(File):
        calls = 0

        def send(self, message):
            Odd.calls += 1
            raise ZeroDivisionError("oh")

    for channel in (File(tmp_path / "a.jsonl"), Odd(tmp_path / "b.jsonl", "odd")):
        delivery = ChannelDelivery(channel, tmp_path)
        delivery.put(alert())
        delivery.flush()
        ended(delivery)
    assert "cannot hold what waits" in caplog.text
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 1
    assert (Odd.calls, delivery.lost) == (1, {"in doubt": 1})


def records(first, last, value=9.0):
    for number in range(first, last):
        yield Finding(Where("r1", number, "c1"), number, "NAN_UPDATE", "critical", 1.0, "NaN")
        yield Metric(Where("r1", number, "c1"), number, "update.norm", value)
        yield Metric(Where("r1", number), number, "time.round", 1.0)


def test_a_finding_that_several_rules_match_is_told_once_on_each_channel(tmp_path):
    """By the first of them; after a restart as well; what is over is told once. Another channel hears its own rule."""
    rules = [
        {"when": "finding severity >= critical", "channels": ["a"]},
        {"when": "finding NAN_UPDATE", "channels": ["a", "b"]},
        "finding confidence >= 0.5",
    ]

    def delivered(name):
        lines = (tmp_path / name).read_text().splitlines()
        return [(one["rule"], one["kind"], one["others"]) for one in map(json.loads, lines)]

    def alerts():
        made = Alerts(rules=rules, channels=[File(tmp_path / "a", name="a"), File(tmp_path / "b", name="b")])
        made.prepare(tmp_path)
        return made

    first = alerts()
    first.write(list(records(0, 3)))
    first.close()
    assert delivered("a") == [("finding severity >= critical", "firing", 2)]
    assert delivered("b") == [("finding NAN_UPDATE", "firing", 0)]
    second = alerts()
    second.write([*records(3, 5), *list(records(5, 20, 1.0))[1::3], *list(records(5, 20))[2::3]])
    second.close()
    assert delivered("a")[1:] == [("finding severity >= critical", "resolved", 0)]
    assert delivered("b")[1:] == [("finding NAN_UPDATE", "resolved", 0)]


def test_a_finding_that_gets_worse_is_told_again(tmp_path):
    """A rule for what is critical is not silenced by one that spoke of a warning."""
    log = tmp_path / "a.jsonl"
    alerts = Alerts(rules=["finding", "finding severity >= critical"], channels=[File(log)], folder=tmp_path)
    for number, severity in enumerate(("warning", "warning", "critical", "critical")):
        found = Finding(Where("r1", number, "c1"), number, "STALE", severity, 1.0, "late")
        alerts.write([found, Metric(Where("r1", number), number, "time.round", 1.0)])
    alerts.close()
    told = [(one["rule"], one["severity"]) for one in map(json.loads, log.read_text().splitlines())]
    assert told == [("finding", "warning"), ("finding severity >= critical", "critical")]


def test_the_shipped_example_tells_of_a_crash_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alerts = Alerts(ROOT / "examples/alerts.toml")
    alerts.prepare(tmp_path / "d", {issue.code: issue.family for issue in ISSUES})
    crash = Finding(Where("r1", 0, "c1"), 0.0, "CRASH", "critical", 1.0, "it crashed")
    alerts.write([crash, Metric(Where("r1", 0), 0.0, "time.round", 1.0)])
    alerts.close()
    (told,) = (tmp_path / "alerts.jsonl").read_text().splitlines()
    assert (json.loads(told)["issue"], json.loads(told)["others"]) == ("CRASH", 1)


def test_a_run_that_is_continued_says_nothing_twice(tmp_path):
    """A second process on the same run knows what is open; what is over is told, also where only silence was wanted."""
    log = tmp_path / "a.jsonl"
    rules = ["finding", {"when": "update.norm > 5", "resolved": False}]

    def delivered():
        return [(one["rule"], one["kind"], one["onset"]) for one in map(json.loads, log.read_text().splitlines())]

    def alerts():
        made = Alerts(rules=rules, channels=[File(log)])
        made.prepare(tmp_path)
        return made

    first = alerts()
    first.write(list(records(0, 3)))
    first.close()
    wanted = [("finding", "firing", 0), ("update.norm > 5", "firing", 0)]
    assert sorted(delivered()) == wanted
    second = alerts()
    second.write([*records(3, 5), *list(records(5, 20, 1.0))[1::3], *list(records(5, 20))[2::3]])
    second.close()
    assert delivered()[2:] == [("finding", "resolved", 0)]
    third = alerts()
    third.write(list(records(20, 21)))
    third.close()
    assert sorted(delivered()[3:]) == [("finding", "firing", 20), ("update.norm > 5", "firing", 20)]


def test_nothing_is_made_before_there_is_an_alert(tmp_path):
    """A healthy run leaves no file and no thread; the same sink serves the next run."""
    alerts = Alerts(rules=["update.norm > 5"], channels=[File(tmp_path / "a.jsonl")], folder=tmp_path / "waiting")
    alerts.write(list(records(0, 3, 1.0)))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fedvitals-")]
    alerts.close()
    assert list(tmp_path.iterdir()) == []
    alerts.write(list(records(3, 4)))
    alerts.close()
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 1
