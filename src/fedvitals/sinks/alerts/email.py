# SPDX-License-Identifier: Apache-2.0
"""Sends alerts by e-mail: one SMTP conversation per message, encrypted unless configured otherwise."""

from __future__ import annotations

import base64
import contextlib
import email.policy
import re
import smtplib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.utils import formatdate

from fedvitals.errors import ConfigError, unknown
from fedvitals.sinks.alerts import channels
from fedvitals.sinks.alerts.channels import DOUBT, LATER, REFUSED, DeliveryError
from fedvitals.sinks.alerts.message import Message
from fedvitals.transport.http_server import LOOPBACK

PORTS = {"starttls": 587, "ssl": 465, "none": 25}


@dataclass(frozen=True, slots=True)
class Email:
    """A channel that sends e-mail to every address in `to`. `security`: «starttls», «ssl», or «none».

    Args:
        host: The mail server.
        sender: The address that messages come from.
        to: The addresses that they go to.
        name: The channel's name, which rules refer to.
        port: The mail server's port; by default that of `security`.
        security: «starttls», «ssl», or «none».
        user: The name to log in with, if the server asks for one.
        password: The password for it.
        again: Whether to resend a message that may have arrived already.
        seconds: The time limit of one attempt.
        ca: A file with the certificates to trust, instead of the system's.
    """

    host: str
    sender: str
    to: tuple[str, ...]
    name: str = "email"
    port: int | None = None  # by default that of `security`
    security: str = "starttls"
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    again: bool = False
    seconds: float = 30.0
    ca: str | None = None  # a file with the certificates to trust, instead of the system's

    def __post_init__(self) -> None:
        if isinstance(self.to, str):
            object.__setattr__(self, "to", (self.to,))
        object.__setattr__(self, "to", tuple(self.to))
        whose = f"of alert channel '{self.name}'"
        channels.check_text(f"The host {whose}", self.host)
        channels.check_ca(self.name, self.ca)
        if not self.to:
            raise ConfigError(f"The e-mail {whose} goes to nobody. Write to = ['you@example.org'].")
        for address in (self.sender, *self.to):
            channels.check_text(f"An e-mail address {whose}", address)
            if not re.fullmatch(r"[^@\s<>,;:\"\\]+@[^@\s<>,;:\"\\]+", address) or not address.isascii():
                raise ConfigError(f"'{address}' {whose} is no e-mail address. Write only 'name@example.org'.")
        if self.security not in PORTS:
            raise ConfigError(unknown("security of an e-mail channel", self.security, PORTS))
        if self.password is not None and self.security == "none" and self.host not in LOOPBACK:
            raise ConfigError(f"The password {whose} would be sent unencrypted. Use security = 'starttls' or 'ssl'.")

    @property
    def identity(self) -> str:
        """A digest that is the same for the same receiver in the next process, without any of its secrets."""
        return channels.identity("email", self.name, self.host, self.port, self.to)

    def send(self, message: Message, /) -> None:
        """Send the message, or raise DeliveryError.

        Args:
            message: The alerts to deliver, and the run that they are about.
        """
        email_bytes = self._email_of(message).as_bytes(policy=email.policy.SMTP)
        handed_over = False
        try:
            with self._connected() as server:
                self._speak(server.mail(self.sender))
                answers = [server.rcpt(address) for address in self.to]
                if not any(200 <= code < 300 for code, _ in answers):
                    self._speak(answers[0])
                handed_over = True  # from here on the other side may have it
                code, words = server.data(email_bytes)
                handed_over = False
                self._speak((code, words))
        except smtplib.SMTPResponseException as error:  # in reply to the greeting, the login or the word DATA
            self._speak((error.smtp_code, error.smtp_error))
        except (OSError, smtplib.SMTPException) as error:
            kind = type(error).__name__
            if handed_over:
                raise DeliveryError(DOUBT, f"{self.host} got the message and gave no answer ({kind}).") from None
            outcome = REFUSED if isinstance(error, smtplib.SMTPNotSupportedError) else LATER
            why = channels.without_secrets(channels.reason_of(error), self._secrets())
            raise DeliveryError(outcome, f"{self.host} cannot be reached ({why}).") from None

    @contextlib.contextmanager
    def _connected(self) -> Iterator[smtplib.SMTP]:
        context = channels.tls_context(self.ca)
        port = self.port or PORTS[self.security]
        if self.security == "ssl":
            server: smtplib.SMTP = smtplib.SMTP_SSL(timeout=self.seconds, context=context)
        else:
            server = smtplib.SMTP(timeout=self.seconds)
        # Only set by `connect` of later Pythons, and needed for the name in the certificate.
        server._host = self.host  # type: ignore[attr-defined]  # noqa: SLF001

        def cut() -> None:
            with contextlib.suppress(OSError, AttributeError):
                server.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]

        try:
            with channels.hard_limit(self.seconds, cut):
                self._speak(server.connect(self.host, port))
                if self.security == "starttls":
                    server.ehlo()
                    server.starttls(context=context)
                server.ehlo_or_helo_if_needed()
                if self.user is not None:
                    server.login(self.user, self.password or "")
                yield server
                with contextlib.suppress(OSError, smtplib.SMTPException):  # it was accepted
                    server.quit()
        finally:
            server.close()

    def _email_of(self, message: Message) -> EmailMessage:
        email_message = EmailMessage()
        email_message["Subject"] = message.subject
        email_message["From"] = self.sender
        email_message["To"] = ", ".join(self.to)
        email_message["Date"] = formatdate()
        email_message["Message-ID"] = f"<{message.key}@fedvitals.invalid>"
        email_message["Auto-Submitted"] = "auto-generated"
        email_message.set_content("\n".join(message.lines) + "\n", cte="quoted-printable")  # any server accepts it
        return email_message

    def _secrets(self) -> list[str]:
        """Return the password, and the forms in which it is sent."""
        if not self.password:
            return []
        sent = (self.password, f"\0{self.user}\0{self.password}")
        return [self.password, *(base64.b64encode(part.encode()).decode() for part in sent)]

    def _speak(self, answer: tuple[int, bytes | str]) -> None:
        """Raise unless the server's answer is positive."""
        code, reply = answer
        if 200 <= code < 400:
            return
        words = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)
        words = channels.without_secrets(words, self._secrets())
        outcome = REFUSED if code >= 500 else LATER
        raise DeliveryError(outcome, f"{self.host} answered {code}: {words}")
