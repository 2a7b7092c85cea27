# SPDX-License-Identifier: Apache-2.0
"""Real servers on this machine that take alerts, refuse them, hang or die: what the tests of alerts share."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import socketserver
import ssl
import subprocess
import threading

import pytest

from fedvitals.sinks.alerts.message import Alert
from support.waiting import PATIENCE


def alert(onset=3, node="c7", kind="firing", rule="update.norm > 5 × own median", **fields) -> Alert:
    told = {"run": "r1", "severity": "warning", "round": onset, "at": 100.0 + onset, "message": f"norm of {node}"}
    return Alert(rule=rule, place=json.dumps({"node": node}), onset=onset, kind=kind, node=node, **{**told, **fields})


class _Quiet(socketserver.ThreadingMixIn):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, *_):
        """A client that gives up is what some tests are about."""


class HttpServer(_Quiet, http.server.HTTPServer):
    """Answers each request by the next word of `script` (its last one for ever); keeps what came."""

    def __init__(self, *script):
        super().__init__(("127.0.0.1", 0), _Http)
        self.script, self.requests, self.free = list(script or [200]), [], threading.Event()
        self.said = None  # (request handler) -> body of a refusal

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/hook/s3cret"

    @property
    def bodies(self):
        return [body for _, _, body in self.requests]


class _Http(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append((self.path, dict(self.headers), body))
        word = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        if word == "die":
            return
        if word == "hang":
            server.free.wait(PATIENCE)
            return
        if word == "drip":  # one byte at a time: every single read is quick
            for byte in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"a" * 1000:
                if server.free.wait(0.1):
                    return
                self.wfile.write(bytes([byte]))
            return
        status, headers = word if isinstance(word, tuple) else (word, {})
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if status >= 400:
            self.wfile.write(server.said(self) if server.said else b"invalid_payload \x1b[31m")

    def log_message(self, *_):
        pass


class SmtpServer(_Quiet, socketserver.TCPServer):
    """Speaks SMTP. `script` tells what becomes of each conversation: «ok», «hang», «die», «550», «451», «greet»."""

    def __init__(self, *script, tls=None, implicit=False, password=None, echoes=False):
        super().__init__(("127.0.0.1", 0), _Smtp)
        self.script, self.letters, self.free = list(script or ["ok"]), [], threading.Event()
        self.tls, self.implicit, self.password, self.logins = tls, implicit, password, []
        self.echoes = echoes  # what was sent to log in

    @property
    def port(self):
        return self.server_address[1]


class _Smtp(socketserver.StreamRequestHandler):
    def setup(self):
        if self.server.implicit:
            self.encrypt()
        super().setup()
        self.secure = self.server.implicit

    def encrypt(self):
        self.request = self.server.tls.wrap_socket(self.request, server_side=True, do_handshake_on_connect=False)
        try:
            self.request.do_handshake()
        except OSError:  # a client that does not trust us
            self.request.close()
            raise

    def finish(self):
        with contextlib.suppress(OSError):
            super().finish()
        self.request.close()

    def say(self, line):
        self.wfile.write(line.encode() + b"\r\n")

    def handle(self):
        word = self.server.script.pop(0) if len(self.server.script) > 1 else self.server.script[0]
        if word == "greet":  # never a word
            self.server.free.wait(PATIENCE)
            return
        self.say("220 test")
        self.to = []
        while line := self.rfile.readline().decode().strip():
            verb = line.split()[0].upper()
            if verb == "DATA" and not self.take(word):
                return
            if verb == "RCPT":
                self.to.append(line)
                self.say("550 no such user" if word == "550" else "250 ok")
            elif verb == "QUIT":
                self.say("221 bye")
                return
            elif verb != "DATA":
                self.answer(verb, line)

    def answer(self, verb, line):
        server = self.server
        if verb in ("EHLO", "HELO"):
            offers = ["AUTH PLAIN"] * bool(server.password) + ["STARTTLS"] * bool(server.tls and not self.secure)
            for offer in ["test", *offers]:
                self.say(f"250-{offer}")
            self.say("250 8BITMIME")
        elif verb == "STARTTLS":
            self.say("220 go ahead")
            self.encrypt()
            self.rfile, self.wfile = self.request.makefile("rb"), self.request.makefile("wb", 0)
            self.secure = True
        elif verb == "AUTH":
            server.logins.append(line)
            self.say(
                "235 welcome"
                if server.password in _decoded(line)
                else f"535 wrong password {line if server.echoes else ''}"
            )
        else:
            self.say("250 ok")

    def take(self, word):
        """The letter; whether the conversation goes on after it."""
        self.say("354 go on")
        data = b"".join(iter(self.rfile.readline, b".\r\n")).decode()
        self.server.letters.append({"to": self.to, "data": data, "secure": self.secure})
        if word == "hang":
            self.server.free.wait(PATIENCE)
        if word in ("hang", "die"):
            return False
        self.say("451 later" if word == "451" else "250 taken")
        return True


def _decoded(line):
    import base64

    return base64.b64decode(line.split()[-1]).decode()


@contextlib.contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="server-of-a-test", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.free.set()
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE)


def certificate(folder):
    """A certificate for 127.0.0.1 that signs itself, and a server's context with it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificate to test with")
    key, certified = folder / "key.pem", folder / "certificate.pem"
    wanted = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *wanted]
    subprocess.run([*made, "-keyout", key, "-out", certified], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certified, key)
    return str(certified), context


def unused_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
