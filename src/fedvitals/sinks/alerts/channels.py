# SPDX-License-Identifier: Apache-2.0
"""Alert channels: the protocol, and the two channels that stay on this machine, a command and a file.

`send` returns when the other side has accepted the message. If not, it raises a `DeliveryError` with one of three
outcomes: «later» (not accepted, try again), «refused» (not accepted, and trying again will not help) or «doubt» (the
message was sent completely and no answer came: it may have arrived).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import unquote

from fedvitals.errors import ConfigError, FedvitalsError
from fedvitals.sinks.alerts.message import Message, alert_json, as_json, harmless

LATER, REFUSED, DOUBT = "later", "refused", "doubt"
WHY = 300  # characters of another program's output that are repeated
# Characters: anything shorter is not treated as a secret; a longer run of a secret's characters is never repeated
SHORTEST_SECRET, LONGEST_ECHO = 4, 5
LEFT_OUT = "(its words are left out: they repeat a part of a secret)"


class DeliveryError(FedvitalsError):
    """A message was refused, or it is unknown whether it arrived."""

    def __init__(self, outcome: str, why: str, *, after: float | None = None) -> None:
        super().__init__(harmless(why, WHY))
        self.outcome = outcome
        self.after = after  # seconds that the other side asks us to wait


@runtime_checkable
class Channel(Protocol):
    """Delivers messages. `again`: whether to resend a message that may have arrived already."""

    @property
    def name(self) -> str: ...
    @property
    def again(self) -> bool: ...
    @property
    def seconds(self) -> float:
        """The time limit of one attempt, in seconds."""
        ...

    @property
    def identity(self) -> str:
        """A digest that is the same for the same receiver in the next process, without any of its secrets."""
        ...

    def send(self, message: Message, /) -> None: ...


def identity(*parts: object) -> str:
    """Return a short digest of what identifies a receiver."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def check_text(what: str, text: object) -> str:
    """Return a setting that must be one line of text, since a line break could add a header or an argument."""
    if not isinstance(text, str) or not text or not text.isprintable():
        raise ConfigError(f"{what} is one line of text, got something else. Check the line ends and quotes.")
    return text


def check_ca(channel: str, path: str | None) -> None:
    """Raise a ConfigError unless `ca` of a channel is None or a file with certificates."""
    if path is None:
        return
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"`ca` of alert channel '{channel}' is no file with certificates: '{harmless(path, WHY)}' "
            f"({_trouble_with(error)}). Write the path of a PEM file (it begins with -----BEGIN CERTIFICATE-----), or "
            "leave out `ca` to trust the system's certificates."
        ) from error


def tls_context(path: str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates of a file, or the system's.

    Raises a DeliveryError if the file can no longer be read: it may reappear, as when certificates are renewed.
    """
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:
        why = f"the certificates of `ca` cannot be read ({_trouble_with(error)}): '{harmless(path or '', WHY)}'."
        raise DeliveryError(LATER, why) from None


def _trouble_with(error: Exception) -> str:
    return "it holds no certificate" if isinstance(error, ssl.SSLError | ValueError) else reason_of(error)


def without_secrets(words: str, secrets: Iterable[str]) -> str:
    """Return another program's output, or a remark instead if it repeats a part of one of the secrets.

    An echo may be escaped, quoted, cut or joined by line ends, so only letters and digits are compared, and the output
    is omitted as a whole instead of replacing the matching part.
    """
    texts = [_letters(words), _letters(unquote(words))]
    for secret in map(_letters, secrets):
        size = min(len(secret), LONGEST_ECHO + 1)
        parts = {secret[at : at + size] for at in range(len(secret) - size + 1)} if size >= SHORTEST_SECRET else ()
        if any(part in text for part in parts for text in texts):
            return LEFT_OUT
    return words


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text)).casefold()


def reason_of(error: Exception) -> str:
    """Return why a connection failed, in words for users."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    words = getattr(error, "strerror", None) or str(error)
    return f"{type(error).__name__}{': ' if words else ''}{words}"


@contextlib.contextmanager
def hard_limit(seconds: float, cut: Callable[[], None]) -> Iterator[None]:
    """Call `cut` if the block takes longer than `seconds`, however slowly a server answers byte by byte."""
    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True, slots=True)
class File:
    """A channel that appends one JSON line for each alert to a file.

    Args:
        path: The file; it is created if it does not exist.
        name: The channel's name, which rules refer to.
        again: Whether to resend a message that may have arrived already.
        seconds: The time limit of one attempt.
    """

    path: str | os.PathLike[str]
    name: str = "file"
    again: bool = False
    seconds: float = 10.0

    @property
    def identity(self) -> str:
        """A digest that is the same for the same receiver in the next process, without any of its secrets."""
        return identity("file", self.name, os.fspath(self.path))

    def send(self, message: Message, /) -> None:
        """Append the message's alerts.

        Args:
            message: The alerts to deliver, and the run that they are about.
        """
        entries = [alert_json(alert) for alert in message.alerts] or [as_json(message)]
        lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()
        path = Path(self.path).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                end = file.seek(0, os.SEEK_END)
                whole = file.write(lines) == len(lines)
                if not whole:  # half a line would corrupt the next one
                    file.truncate(end)
        except OSError as error:
            raise DeliveryError(LATER, f"The file {path} cannot be written ({error}).") from error
        if not whole:
            raise DeliveryError(LATER, f"The file {path} cannot be written: the disk is full.")


@dataclass(frozen=True, slots=True)
class Command:
    """A channel that runs a program, without a shell, with the message as JSON on its standard input.

    Args:
        command: The program and its arguments.
        name: The channel's name, which rules refer to.
        again: Whether to resend a message that may have arrived already.
        seconds: The time limit of one attempt.
        label: How the command is shown, with secrets left out.
        secrets: Texts that must not be repeated into the log.
    """

    command: tuple[str, ...]
    name: str = "command"
    again: bool = False
    seconds: float = 30.0
    label: str = field(default="", repr=False)  # the command before secrets were filled in
    secrets: tuple[str, ...] = field(default=(), repr=False)  # which its error output may not repeat into the log

    def __post_init__(self) -> None:
        arguments = self.command
        if (
            isinstance(arguments, str)
            or not arguments
            or not all(isinstance(argument, str) and "\0" not in argument for argument in arguments)
        ):
            raise ConfigError(
                "The command of an alert channel is a list of arguments, such as ['/usr/bin/logger', '-t', 'alerts']: "
                "there is no shell that would take a line apart."
            )
        object.__setattr__(self, "command", tuple(arguments))

    @property
    def identity(self) -> str:
        """A digest that is the same for the same receiver in the next process, without any of its secrets."""
        return identity("command", self.name, self.label or self.command)

    def send(self, message: Message, /) -> None:
        """Run the program and wait until it ends or its time is over.

        Args:
            message: The alerts to deliver, and the run that they are about.
        """
        with tempfile.TemporaryFile() as output:  # with a pipe, we would wait for a grandchild that keeps it open
            try:
                process = subprocess.Popen(  # noqa: S603 - the user's own command, without any text from a client
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=output,
                    start_new_session=True,  # so that the processes it started end with it
                )
            except OSError as error:
                raise DeliveryError(LATER, f"'{self.command[0]}' cannot be started ({error}).") from error
            try:
                process.communicate(json.dumps(as_json(message)).encode(), timeout=self.seconds)
            except subprocess.TimeoutExpired:
                raise DeliveryError(DOUBT, f"'{self.command[0]}' did not end within {self.seconds:g} s.") from None
            finally:
                _end(process)
            if process.returncode != 0:
                output.seek(0)
                words = without_secrets(output.read(WHY).decode("utf-8", "replace").strip(), self.secrets)
                why = f"'{self.command[0]}' ended with {process.returncode}{': ' + words if words else ''}."
                raise DeliveryError(LATER, why)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program that is still running, and the processes it started."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
