# SPDX-License-Identifier: Apache-2.0
"""`alerts.toml`, `fedvitals alerts test` and `fedvitals alerts check`."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from fedvitals.cli.main import main
from fedvitals.errors import ConfigError
from fedvitals.records import Finding, Metric, Run, Where
from fedvitals.sinks.alerts.channels import DeliveryError
from fedvitals.sinks.alerts.config import load
from fedvitals.sinks.alerts.message import Message
from fedvitals.sinks.alerts.sink import Alerts, Command, Email, File, Webhook
from fedvitals.store import open_store
from support.alert_servers import HttpServer, certificate, running, unused_port
from support.paths import ROOT

RULE = '[[rules]]\nwhen = "loss > 3"\n'
FILE = '[channels.log]\nkind = "file"\npath = "a.jsonl"\n'


def called(capsys, *arguments):
    """Exit code, and what was printed as result and as remark."""
    with pytest.raises(SystemExit) as left:
        main(["alerts", *map(str, arguments)])
    return left.value.code, *capsys.readouterr()


def test_every_setting(tmp_path, monkeypatch):
    """All kinds of channels with all their settings; secrets come from the environment, and stay out of sight."""
    monkeypatch.setenv("HOOK", "https://hooks.example.org/s3cret")
    monkeypatch.setenv("MAIL_PASSWORD", "pa55\n")
    path = tmp_path / "alerts.toml"
    path.write_text(
        """
        group = false
        folder = "waiting"
        [channels.team]
        kind = "webhook"
        url = "${HOOK}"
        headers = { Authorization = "Bearer ${MAIL_PASSWORD}" }
        timeout = "3 s"
        again = true
        [channels.mail]
        kind = "email"
        host = "smtp.example.org"
        port = 2525
        security = "ssl"
        user = "me"
        password = "${MAIL_PASSWORD}"
        from = "a@example.org"
        to = ["b@example.org"]
        [channels.page]
        kind = "command"
        command = ["/bin/page", "${MAIL_PASSWORD}"]
        [channels.log]
        kind = "file"
        path = "a.jsonl"
        [[rules]]
        when = "loss > 3"
        name = "high loss"
        severity = "critical"
        gap = "10 min"
        node = "c*"
        resolved = false
        channels = ["mail", "log"]
        """
    )
    alerts = Alerts(path, rules=["loss > 4"])
    team, mail, page, log = alerts.channels
    assert [one.name for one in alerts.rules] == ["high loss", "loss > 4"]
    assert team == Webhook(
        "https://hooks.example.org/s3cret", "team", True, 3.0, {"Authorization": "Bearer pa55"}, label="${HOOK}"
    )
    assert mail == Email("smtp.example.org", "a@example.org", ("b@example.org",), "mail", 2525, "ssl", "me", "pa55")
    assert (page.command, type(page), log) == (("/bin/page", "pa55"), Command, File("a.jsonl", "log"))
    assert alerts.folder == Path("waiting")
    assert "s3cret" not in repr(alerts.channels[:2])
    assert "pa55" not in repr(alerts.channels[:2])
    assert team.identity == Webhook("https://changed.example.org/", "team", label="${HOOK}").identity
    monkeypatch.delenv("HOOK")
    assert load(path, secrets=False).channels == ()
    with pytest.raises(ConfigError, match="environment variable 'HOOK' is not set"):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "It has no rule"),
        (RULE, "There is no channel"),
        (FILE, "It has no rule"),
        ("x = [", "cannot be read"),
        (FILE + RULE + RULE, "Two rules are called 'loss > 3'"),
        (FILE + '[[rules]]\nwhen = "losss > 3"', "Did you mean 'loss'"),
        (FILE + '[[rules]]\nwhat = "loss > 3"', "Rule 1 has no `when`"),
        (FILE + RULE + 'chanel = "a"', "Did you mean 'channels'"),
        (FILE + RULE + 'channels = ["lug"]', "Unknown channel 'lug'. Known: log. Did you mean 'log'"),
        (
            RULE + '[channels.x]\nkind = "slack"',
            "Unknown kind of channel 'slack'. Known: command, email, file, webhook",
        ),
        (RULE + '[channels.x]\nkind = "webhook"', "needs `url`"),
        (RULE + '[channels.x]\nkind = "webhook"\nurl = "ftp://x"', "http:// or https:// addresses, got ftp:"),
        (
            RULE + '[channels.x]\nkind = "webhook"\nurl = "https://x"\nretries = 3',
            "Unknown setting of the webhook channel",
        ),
        (RULE + '[channels.x]\nkind = "command"\ncommand = "rm -rf /"', "`command` of the command channel 'x' is list"),
        (RULE + '[channels.x]\nkind = "file"\npath = "a"\ntimeout = "3 rounds"', "A timeout is up to 300 s"),
        (RULE + '[channels."a b"]\nkind = "file"\npath = "a"', "A channel's name is up to 40 letters"),
        ("group = 3\n" + FILE + RULE, "`group` is bool, got int"),
        ("channels = 3\n" + RULE, "`channels` is dict"),
    ],
)
def test_what_is_wrong_in_a_file_is_told(tmp_path, text, message):
    """With the file's name, what was got and what to write."""
    path = tmp_path / "alerts.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_alerts_without_a_file():
    """Rules and channels in Python are held to the same standard, and nothing is opened before the first record."""
    for arguments, said in (
        ({}, "need a rule"),
        ({"rules": ["loss > 3"]}, "no channel"),
        ({"rules": [3], "channels": [File("a")]}, "Rule 1 has no `when`"),
        ({"rules": ["loss > 3"], "channels": [File("a"), File("b")]}, "Two channels are called 'file'"),
    ):
        with pytest.raises(ConfigError, match=said):
            Alerts(**arguments)
    alerts = Alerts(rules=["loss > 3"], channels=[File("/nowhere/a")])
    assert alerts.folder is None
    alerts.close()
    assert alerts.lost == {}


def test_the_monitor_tells_where_and_which(tmp_path, caplog):
    """`begin` gives the folder beside the store, unless one was named, and each issue's family."""
    alerts = Alerts(rules=["finding in cleint"], channels=[File("a")])
    with caplog.at_level(logging.WARNING):
        alerts.prepare(tmp_path / "runs.db.d", {"NAN_UPDATE": "client"})
    assert alerts.folder == tmp_path / "runs.db.d"
    assert "Did you mean 'client'" in caplog.text
    named = Alerts(rules=["finding"], channels=[File("a")], folder=tmp_path)
    named.prepare(tmp_path / "runs.db.d")
    assert named.folder == tmp_path
    path = tmp_path / "alerts.toml"
    path.write_text(FILE + RULE)
    assert Alerts(path).folder == tmp_path / "alerts.toml.d"


def test_alerts_test_says_who_took_it(tmp_path, capsys):
    """Every channel gets one message; 1 if one did not take it, and why."""
    path = tmp_path / "alerts.toml"
    with running(HttpServer()) as server:
        channels = f'[channels.up]\nkind = "webhook"\nurl = "{server.url}"\n'
        path.write_text(channels + RULE + '[[rules]]\nwhen = "finding NAN_UPDAT"\n')
        code, out, err = called(capsys, "test", "--config", path)
        assert (code, out) == (0, "up (webhook): taken\n")
        assert "Did you mean 'NAN_UPDATE'" in err
        channels += f'[channels.down]\nkind = "webhook"\nurl = "http://127.0.0.1:{unused_port()}/s3cret"\n'
        path.write_text(channels + RULE)
        code, out, err = called(capsys, "test", "--config", path)
        assert code == 1
        assert "up (webhook): taken\ndown (webhook): not taken (a training would try again): 127.0.0.1 cannot be" in out
        assert "s3cret" not in out + err
        code, out, _ = called(capsys, "test", "--config", path, "--channel", "up", "--json")
        told = json.loads(out)["result"]["channels"]
        assert (code, told) == (0, [{"channel": "up", "kind": "webhook", "outcome": "taken", "why": ""}])
        code, _, err = called(capsys, "test", "--config", path, "--channel", "upp")
        assert (code, "Did you mean 'up'" in err) == (2, True)
    assert len(server.requests) == 3
    assert len({headers["Idempotency-Key"] for _, headers, _ in server.requests}) == 3
    assert "this is a test" in server.bodies[0]["text"]
    code, _, err = called(capsys, "test", "--config", tmp_path / "none.toml")
    assert (code, "There is no file" in err) == (2, True)


@pytest.mark.parametrize("kind", ['webhook"\nurl = "https://x', 'email"\nhost = "x"\nto = ["a@b.c"]\nfrom = "a@b.c'])
def test_a_wrong_file_of_certificates_is_told_before_anything_is_sent(tmp_path, capsys, kind):
    path = tmp_path / "alerts.toml"
    (tmp_path / "empty.pem").write_text("no certificate")
    for ca, why in (("none.pem", "No such file"), ("empty.pem", "it holds no certificate"), (".", "")):
        path.write_text(f'[channels.up]\nkind = "{kind}"\nca = "{tmp_path / ca}"\n{RULE}')
        code, _, err = called(capsys, "test", "--config", path)
        assert code == 2
        assert "`ca` of alert channel 'up' is no file with certificates" in err
        assert why in err
        assert "leave out `ca`" in err
        assert "Traceback" not in err


def test_certificates_that_vanish_while_it_trains_are_a_delivery_to_try_again(tmp_path):
    file = Path(certificate(tmp_path)[0])
    channels = (Webhook("https://127.0.0.1:1/", ca=str(file)), Email("127.0.0.1", "a@b.c", ("a@b.c",), ca=str(file)))
    file.unlink()
    for channel in channels:
        with pytest.raises(DeliveryError, match="the certificates of `ca` cannot be read") as error:
            channel.send(Message((), test="x"))
        assert error.value.outcome == "later"


def test_alerts_check_says_what_would_have_been_sent(tmp_path, capsys):
    """Round, severity, words and rule of each; the environment need not have any secret."""
    store = open_store(tmp_path / "runs.db")
    records = [Run("run-1", "digits", started=1.0)]
    for number in range(12):
        records += [
            Metric(Where("run-1", number, "c1"), number, "update.norm", 50.0 if 4 <= number < 6 else 1.0),
            Metric(Where("run-1", number), number, "time.round", 1.0),
        ]
    records.append(Finding(Where("run-1", 3, "c1\x1b[31m"), 3.5, "NAN_UPDATE", "critical", 1.0, "bad [red] \x1b[31m"))
    store.write(records)
    store.close()
    path = tmp_path / "alerts.toml"
    path.write_text(
        '[channels.team]\nkind = "webhook"\nurl = "${NOT_SET}"\n[[rules]]\nwhen = "update.norm > 5 × own median"\n'
        '[[rules]]\nwhen = "finding severity >= critical"\n'
    )
    code, out, _ = called(capsys, "check", "digits", "--config", path, "--store", tmp_path / "runs.db")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "2 alerts, 2 of them resolved, by 2 rules on run run-1"
    assert lines[1] == "  round    3  critical  bad [red] ?[31m  (finding severity >= critical)"
    assert "round    4  warning   update.norm of c1 is 50 (> 5 × its own median, 1)" in lines[2]
    assert "round    6  resolved" in lines[3]
    code, out, _ = called(capsys, "check", "run", "--config", path, "--store", tmp_path / "runs.db", "--json")
    told = json.loads(out)["result"]
    assert (told["run"], [one["round"] for one in told["alerts"]]) == ("run-1", [3, 4, 6, 9])
    assert told["alerts"][0]["node"] == "c1?[31m"


def test_the_example_and_the_page(tmp_path):
    """The example can be read, and docs/alerts.md shows only rules and settings that are right."""
    assert len(load(ROOT / "examples" / "alerts.toml").rules) == 7
    page = (ROOT / "docs" / "alerts.md").read_text()
    for number, block in enumerate(page.split("```toml\n")[1:]):
        path = tmp_path / f"{number}.toml"
        path.write_text(block.split("```")[0])
        load(path, secrets=False)


def test_alerts_load_without_torch():
    """On an aggregator or a dashboard host there is none."""
    code = "import sys, fedvitals.sinks.alerts.sink, fedvitals.cli.alerts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
