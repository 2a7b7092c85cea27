# SPDX-License-Identifier: Apache-2.0
"""Channels against real servers: taken, refused, hanging, dying; and no word of a client does anything but be read."""

import email
import email.policy
import json
import sys
from urllib.parse import quote

import pytest

from fedvitals.errors import ConfigError
from fedvitals.sinks.alerts.channels import DeliveryError
from fedvitals.sinks.alerts.config import load
from fedvitals.sinks.alerts.delivery import ChannelDelivery
from fedvitals.sinks.alerts.message import Message, alert_json, for_discord, for_slack, harmless
from fedvitals.sinks.alerts.sink import Command, Email, File, Webhook
from support.alert_servers import HttpServer, SmtpServer, alert, certificate, running, unused_port
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.thorough  # CI runs it; `scripts/test --fast` does not

MESSAGE = Message((alert(3), alert(5, "c8", severity="critical"), alert(4, "c9", kind="resolved")))
HOSTILE = "<!channel> <@U1> @everyone [click](https://evil.example) *b* \r\nBcc: all@x.org\x1b[31m \u202e" + "a" * 5000


def outcome(channel, message=MESSAGE):
    """What `send` raised, as (outcome, words)."""
    with pytest.raises(DeliveryError) as error:
        channel.send(message)
    return error.value.outcome, str(error.value)


def test_a_webhook_speaks_slack_and_discord():
    """One POST with `text`, `content` and the alerts as data, and a key that names exactly these alerts."""
    with running(HttpServer()) as server:
        Webhook(server.url, headers={"Authorization": "Bearer x"}).send(MESSAGE)
        Webhook(server.url).send(MESSAGE)
        Webhook(server.url).send(Message((alert(3),)))
    path, headers, body = server.requests[0]
    assert path == "/hook/s3cret"
    assert headers["Authorization"] == "Bearer x"
    assert headers["Content-Type"] == "application/json"
    keys = [headers["Idempotency-Key"] for _, headers, _ in server.requests]
    assert keys[0] == keys[1] == MESSAGE.key != keys[2]
    assert body["text"].splitlines() == [
        "fedvitals, run r1:",
        "warning, round 3: norm of c7",
        "critical, round 5: norm of c8",
        "resolved, round 4: norm of c9",
    ]
    assert body["content"].startswith("fedvitals, run r1:")
    assert body["allowed_mentions"] == {"parse": []}
    assert [one["id"] for one in body["fedvitals"]["alerts"]] == [one.id for one in MESSAGE.alerts]


@pytest.mark.parametrize(
    ("word", "wanted", "message"),
    [
        (500, "later", "answered 500: invalid_payload"),
        (429, "later", "429"),
        (404, "refused", "404"),
        ((302, {"Location": "/other"}), "refused", "redirects (status 302)"),
        ((307, {"Location": "http://169.254.169.254/latest"}), "refused", "redirects to http://169.254.169.254"),
        ((307, {"Location": "file:///etc/passwd"}), "refused", "no web address"),
        ((307, {"Location": "ftp://127.0.0.1/x"}), "refused", "no web address"),
        ((308, {"Location": "/again"}), "refused", "more than 3 times"),
        ("die", "doubt", "gave no answer"),
        ("hang", "doubt", "gave no answer within 0.3 s"),
        ("drip", "doubt", "gave no answer within 0.3 s"),
    ],
)
def test_what_a_web_server_may_do(word, wanted, message):
    """Each way of not taking a message is told apart, and what it says back is fit for a terminal."""
    with running(HttpServer(word)) as server:
        got, words = outcome(Webhook(server.url, seconds=0.3 if word in ("hang", "drip") else PATIENCE))
        wait_until(lambda: server.requests)  # the server may be slower than the client's 0.3 s
    assert got == wanted
    assert message in words
    assert "\x1b" not in words
    assert "s3cret" not in words
    assert len(server.requests) == (4 if isinstance(word, tuple) and word[0] == 308 else 1)


def test_a_webhook_follows_its_own_host_only():
    """A redirect that keeps method and origin is followed; a server's wish to wait is passed on."""
    with running(HttpServer((307, {"Location": "/new?x=1"}), 200)) as server:
        Webhook(server.url).send(MESSAGE)
        assert [path for path, _, _ in server.requests] == ["/hook/s3cret", "/new?x=1"]
        server.script = [(429, {"Retry-After": "7"})]
        with pytest.raises(DeliveryError) as error:
            Webhook(server.url).send(MESSAGE)
    assert error.value.after == 7


ECHOES = {
    "address": lambda asked: f"no such hook: {asked.path}".encode(),
    "escaped": lambda asked: json.dumps({"got": quote(asked.path, safe="")}).encode(),
    "headers": lambda asked: str(asked.headers).encode(),
    "cut": lambda asked: b"x" * 175 + str(asked.headers["Authorization"]).encode(),
    "lines": lambda asked: "\n".join(asked.path[i : i + 3] for i in range(0, len(asked.path), 3)).encode(),
    "capitals": lambda asked: asked.path.upper().encode(),
}
PATH, TOKEN = "Zq8TfJ2mXw94RkLp", "dG9wIHNlY3JldCB0b2tlbg"


def leaked(text):
    """Whether eight letters of a secret in a row are in the text, in whatever case and with whatever between them."""
    letters = "".join(filter(str.isalnum, text)).casefold()
    secrets = [secret.casefold() for secret in (PATH, TOKEN)]
    return any(secret[at : at + 8] in letters for secret in secrets for at in range(len(secret) - 7))


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("status", [400, 503])
def test_a_server_that_repeats_the_request_gets_no_secret_into_the_log(tmp_path, caplog, echo, status):
    """Neither of the address nor of a header, in no error, log or outbox."""
    with running(HttpServer(status)) as server:
        server.said = ECHOES[echo]
        url = f"{server.url.removesuffix('/hook/s3cret')}/services/T0/{PATH}?thread=1"
        channel = Webhook(url, headers={"Authorization": f"Bearer {TOKEN}"})
        _, words = outcome(channel)
        delivery = ChannelDelivery(channel, tmp_path)
        delivery.put(alert())
        assert delivery.flush()
        delivery.stop(PATIENCE)
        delivery.join()
    assert f"answered {status}" in words
    assert not leaked(words)
    assert f"answered {status}" in caplog.text
    assert not leaked(caplog.text)
    assert not leaked("".join(path.read_bytes().decode("latin-1") for path in tmp_path.iterdir()))


def test_what_a_server_says_otherwise_is_still_told():
    """Words that every service shares with its address are no secret."""
    with running(HttpServer(404)) as server:
        server.said = lambda _: b'{"message": "Unknown Webhook", "code": 10015}'
        url = f"{server.url.removesuffix('/hook/s3cret')}/api/webhooks/123456/{PATH}"
        assert "Unknown Webhook" in outcome(Webhook(url))[1]


def test_a_mail_server_that_repeats_the_login_gets_no_password_into_the_log(tmp_path):
    """It is sent in base64, and so it comes back."""
    trusted, context = certificate(tmp_path)
    with running(SmtpServer(tls=context, implicit=True, password="right", echoes=True)) as server:
        where = ("127.0.0.1", "fed@x.org", ("a@x.org",))
        settings = {"security": "ssl", "user": "me", "password": PATH, "ca": trusted}
        _, words = outcome(Email(*where, port=server.port, **settings))
        sent = server.logins[0].split()[-1]
    assert "answered 535" in words
    assert sent not in words
    assert sent[8:16] not in words


def test_a_command_that_repeats_its_arguments_gets_no_secret_into_the_log(tmp_path, monkeypatch):
    """Those that came out of the environment are secrets; the others stand in the file."""
    monkeypatch.setenv("PAGER_TOKEN", TOKEN)
    config = tmp_path / "alerts.toml"
    script = "import sys; sys.exit('cannot page with ' + sys.argv[-1])"
    config.write_text(
        f'[[rules]]\nwhen = "finding"\n[channels.pager]\nkind = "command"\n'
        f'command = ["{sys.executable}", "-c", "{script}", "token=${{PAGER_TOKEN}}"]\n'
    )
    _, words = outcome(load(config).channels[0])
    assert "ended with 1" in words
    assert not leaked(words)
    assert "cannot page with home" in outcome(Command((sys.executable, "-c", script, "home")))[1]


def test_a_channel_of_ones_own_that_fails_gets_no_secret_into_the_log(tmp_path, caplog):
    """Libraries put the whole address into their errors."""

    class Own:
        name, again, seconds, identity = "own", False, 1.0, "own"

        def send(self, _message):
            raise ConnectionError(f"Max retries exceeded with url: https://hooks.example/{PATH}")

    delivery = ChannelDelivery(Own(), tmp_path)
    delivery.put(alert())
    assert delivery.flush()
    delivery.stop(PATIENCE)
    delivery.join()
    assert "send() of Own raised ConnectionError" in caplog.text
    assert not leaked(caplog.text)


def test_a_server_that_is_not_there():
    """Nothing left the machine, so it is no matter of doubt."""
    got, words = outcome(Webhook(f"http://127.0.0.1:{unused_port()}/s3cret"))
    assert (got, "Connection refused" in words, "s3cret" in words) == ("later", True, False)
    assert outcome(Email("127.0.0.1", "a@x.org", ("b@x.org",), port=unused_port(), security="none"))[0] == "later"


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://x.org/", "gopher://x", "http://", "https://u:p@x.org/", "x.org/hook",
            "http://x.org/\r\nHost: evil", "http://x.org:99999/", "http://x.org:0/", "", "http://x.org/a b"],
)  # fmt: skip
def test_only_web_addresses(url):
    """Other schemes, hidden passwords and line ends are refused when the channel is made."""
    with pytest.raises(ConfigError):
        Webhook(url)
    with pytest.raises(ConfigError):
        Webhook("https://x.org", headers={"X": "a\r\nY: b"})


def test_https_with_a_certificate_of_ones_own(tmp_path):
    """Trusted if named, else refused with the reason."""
    trusted, context = certificate(tmp_path)
    server = HttpServer()
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with running(server):
        url = server.url.replace("http:", "https:")
        Webhook(url, ca=trusted).send(MESSAGE)
        got, words = outcome(Webhook(url))
    assert (got, "certificate is not trusted" in words) == ("later", True)
    assert len(server.requests) == 1


def read(server, place=0):
    return email.message_from_string(server.letters[place]["data"], policy=email.policy.default)


def test_an_e_mail(tmp_path):
    """From, to, subject and text; the same key gives the same Message-ID, so that mail programs know it again."""
    with running(SmtpServer()) as server:
        channel = Email("127.0.0.1", "fed@x.org", ["a@x.org", "b@x.org"], port=server.port, security="none")
        channel.send(MESSAGE)
    letter = read(server)
    assert [line.split(":")[1].split()[0] for line in server.letters[0]["to"]] == ["<a@x.org>", "<b@x.org>"]
    assert letter["Subject"] == "[fedvitals] critical: update.norm > 5 × own median at c8 and 2 more"
    assert letter["Message-ID"] == f"<{MESSAGE.key}@fedvitals.invalid>"
    assert letter["Auto-Submitted"] == "auto-generated"
    assert "critical, round 5: norm of c8" in letter.get_content()


@pytest.mark.parametrize("implicit", [True, False])
def test_an_e_mail_is_encrypted_and_logs_in(tmp_path, implicit):
    """By STARTTLS or from the first byte; a server whose certificate is not trusted gets no password."""
    trusted, context = certificate(tmp_path)
    settings = {"security": "ssl" if implicit else "starttls", "user": "me", "password": "pa55"}
    with running(SmtpServer(tls=context, implicit=implicit, password="pa55")) as server:
        where = ("127.0.0.1", "fed@x.org", ("a@x.org",))
        Email(*where, port=server.port, ca=trusted, **settings).send(MESSAGE)
        assert server.letters[0]["secure"]
        assert len(server.logins) == 1
        got, words = outcome(Email(*where, port=server.port, **settings))
        assert (got, "certificate is not trusted" in words) == ("later", True)
        assert len(server.logins) == 1
        got, words = outcome(Email(*where, port=server.port, ca=trusted, **{**settings, "password": "another"}))
        assert (got, "535" in words, "wrong password" in words) == ("refused", True, True)


@pytest.mark.parametrize(
    ("word", "wanted", "letters"),
    [("550", "refused", 0), ("451", "later", 1), ("die", "doubt", 1), ("hang", "doubt", 1), ("greet", "later", 0)],
)
def test_what_a_mail_server_may_do(word, wanted, letters):
    """Only a letter that went out whole and was not answered is in doubt."""
    seconds = {"hang": 1.5, "greet": 0.3}.get(word, PATIENCE)
    with running(SmtpServer(word)) as server:
        got, _ = outcome(
            Email("127.0.0.1", "a@x.org", ("b@x.org",), port=server.port, security="none", seconds=seconds)
        )
        wait_until(lambda: len(server.letters) == letters)
    assert (got, len(server.letters)) == (wanted, letters)


def test_a_mail_server_without_encryption_is_not_talked_to():
    """Whoever asked for STARTTLS gets it, or nothing is sent."""
    with running(SmtpServer()) as server:
        got, words = outcome(Email("127.0.0.1", "a@x.org", ("b@x.org",), port=server.port))
    assert (got, "STARTTLS" in words, server.letters) == ("refused", True, [])


@pytest.mark.parametrize(
    "settings",
    [
        {"sender": "a@x.org\r\nBcc: all@x.org"}, {"to": ("b@x.org, c@x.org",)}, {"to": ("b@x.org\n",)}, {"to": ()},
        {"sender": "nobody"}, {"host": "x.org\r\n"}, {"security": "tls"}, {"password": "p", "security": "none"},
        {"to": ("<b@x.org>",)}, {"to": ("bé@x.org",)},
    ],
)  # fmt: skip
def test_what_could_forge_a_letter_is_refused(settings):
    """Line ends, lists in one address, and passwords in the clear."""
    with pytest.raises(ConfigError):
        Email(**{"host": "smtp.x.org", "sender": "a@x.org", "to": ("b@x.org",), **settings})


def test_words_of_clients_are_harmless():
    """They mention nobody, link nowhere, end no line or header, move no cursor, and are cut."""
    message = Message((alert(3, HOSTILE, run=HOSTILE, message=HOSTILE, issue=HOSTILE, rule="finding"),))
    assert "\n" not in message.subject
    assert len(message.subject) <= 150
    slack, discord = for_slack(message.lines), for_discord(message.lines)
    assert len(slack) <= 1900 >= len(discord)
    for text in (slack, discord, *message.lines):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\r" not in text
    assert "<" not in slack
    assert "@everyone" not in slack + discord
    assert "https://evil" not in slack + discord
    assert r"\[click\]\(" in discord
    assert r"\<\!channel".replace(r"\!", "!") in discord
    with running(SmtpServer()) as server:
        Email("127.0.0.1", "a@x.org", ("b@x.org",), port=server.port, security="none").send(message)
    assert read(server)["Bcc"] is None
    assert len(json.dumps(alert_json(message.alerts[0]))) < 3000


def test_cutting_never_leaves_half_an_escape():
    """A text of the longest kind ends in a whole character."""
    for text in ("*" * 5000, "_a" * 3000):
        cut = for_discord([text])
        assert len(cut) <= 1900
        assert not cut[:-1].endswith("\\")
    assert harmless("a" * 10, 5) == "aaaa…"
    assert harmless("\ud800", 5) == "?"


def test_a_message_of_very_many():
    """Twenty lines for people, and how many more there are."""
    message = Message(tuple(alert(n) for n in range(50)), doubtful=2)
    assert len(message.lines) == 23
    assert message.lines[-2:] == ["and 30 more", "2 earlier alerts to this channel may not have arrived."]


PROGRAM = "import sys, json; told = json.load(sys.stdin); open(sys.argv[1], 'a').write(json.dumps(told) + '\\n')"


def test_a_command_gets_json_and_no_shell(tmp_path):
    """The alert comes on standard input; arguments are taken as they are."""
    out = tmp_path / "$(touch pwned); x"
    Command((sys.executable, "-c", PROGRAM, str(out))).send(MESSAGE)
    told = json.loads(out.read_text())
    assert [one["node"] for one in told["alerts"]] == ["c7", "c8", "c9"]
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize(
    ("command", "wanted", "message"),
    [
        ((sys.executable, "-c", "import sys; sys.exit('broken \\x1b[1m')"), "later", "ended with 1: broken ?[1m"),
        (("/nowhere/at-all",), "later", "cannot be started"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), "doubt", "did not end within 0.5 s"),
        (("/bin/sh", "-c", "sleep 60 & wait"), "doubt", "did not end within 0.5 s"),
        (("/bin/sh", "-c", "exec <&-; exit 3"), "later", "ended with 3"),
    ],
)
def test_what_a_command_may_do(command, wanted, message):
    """Its exit code decides; one that does not end is ended, with all that it started."""
    many = Message(tuple(alert(n, message="a" * 400) for n in range(300)))  # more than a pipe holds
    got, words = outcome(Command(command, seconds=0.5 if wanted == "doubt" else PATIENCE), many)
    assert (got, message in words) == (wanted, True), words


def test_a_command_is_a_list():
    """A line for a shell is refused."""
    for command in ("rm -rf /", (), ("a\0b",), (1,)):
        with pytest.raises(ConfigError):
            Command(command)


def test_a_file_gets_a_line_for_each_alert(tmp_path):
    """Appended; what cannot be written is tried later."""
    path = tmp_path / "deep" / "alerts.jsonl"
    File(path).send(MESSAGE)
    File(path).send(Message((alert(9, value=float("nan")),)))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["round"] for line in lines] == [3, 5, 4, 9]
    assert lines[-1]["value"] is None
    assert outcome(File(tmp_path))[0] == "later"


def test_secrets_are_not_shown():
    """Neither in `repr`, which lands in logs and tracebacks, nor in the identity that is stored."""
    channels = (
        Webhook("https://x.org/s3cret", headers={"A": "s3cret"}),
        Email("x.org", "a@x.org", ("b@x.org",), user="u", password="s3cret"),
    )
    for channel in channels:
        assert "s3cret" not in repr(channel) + channel.identity
