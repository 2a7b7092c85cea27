# SPDX-License-Identifier: Apache-2.0
"""Posts alerts to a web address, as one JSON that Slack, Discord, Mattermost and other programs understand.

Slack and Mattermost read `text`, Discord reads `content`, a program reads `fedvitals`. The header `Idempotency-Key` is
the same whenever the same alerts are sent.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urljoin, urlsplit

from fedvitals.errors import ConfigError
from fedvitals.sinks.alerts import channels
from fedvitals.sinks.alerts.channels import DOUBT, LATER, REFUSED, DeliveryError
from fedvitals.sinks.alerts.message import Message, as_json, for_discord, for_slack

ANSWER = 4096  # bytes of an answer that are read
REDIRECTS = 3
LONGEST_WAIT = 3600.0  # seconds that a server may ask us to wait
MOST_ALERTS = 100  # in the JSON of one message
TRY_AGAIN = (408, 425, 429)  # besides 5xx: not accepted now, but perhaps later
SAME_METHOD = (307, 308)  # the redirects that repeat a POST as a POST
NO_SECRETS = frozenset(("api", "hook", "hooks", "incoming", "integrations", "message", "messages", "notify", "post",
                        "rooms", "services", "triggers", "webhook", "webhookb2", "webhooks", "workflows"))  # fmt: skip
"""Parts of an address that well-known services share."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """A channel that posts to an http or https address. Only its host is ever shown: the path is often a secret.

    Args:
        url: The address.
        name: The channel's name, which rules refer to.
        again: Whether to resend a message that may have arrived already.
        seconds: The time limit of one attempt.
        headers: HTTP headers that are sent along.
        ca: A file with the certificates to trust, instead of the system's.
        label: How the address is shown, with secrets left out.
    """

    url: str = field(repr=False)
    name: str = "webhook"
    again: bool = False
    seconds: float = 10.0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca: str | None = None  # a file with the certificates to trust, instead of the system's
    label: str = field(default="", repr=False)  # the address before secrets were filled in

    def __post_init__(self) -> None:
        _split(self.url)
        channels.check_ca(self.name, self.ca)
        for name, value in self.headers.items():
            channels.check_text(f"The name of a header of alert channel '{self.name}'", name)
            channels.check_text(f"The header '{name}' of alert channel '{self.name}'", value)

    @property
    def identity(self) -> str:
        """A digest that is the same for the same receiver in the next process, without any of its secrets."""
        return channels.identity("webhook", self.name, self.label or self.url)

    def send(self, message: Message, /) -> None:
        """Post the message, or raise DeliveryError.

        Args:
            message: The alerts to deliver, and the run that they are about.
        """
        lines, data = message.lines, as_json(message)
        data["alerts"] = data["alerts"][:MOST_ALERTS]
        body = {
            "text": for_slack(lines),
            "content": for_discord(lines),
            "allowed_mentions": {"parse": []},  # Discord's own setting
            "fedvitals": data,
        }
        payload = json.dumps(body).encode()
        headers = {"User-Agent": "fedvitals", **self.headers, "Content-Type": "application/json"}
        headers["Idempotency-Key"] = message.key
        url = self.url
        for _ in range(REDIRECTS + 1):
            onward = self._post(_split(url), payload, headers)
            if onward is None:
                return
            url = self._followed(url, onward)
        raise DeliveryError(REFUSED, f"{_shown(self.url)} redirects more than {REDIRECTS} times.")

    def _post(self, url: SplitResult, payload: bytes, headers: Mapping[str, str]) -> str | None:
        """Return the address that the server redirects to; None if it has accepted the message."""
        whole, host = False, url.hostname or ""
        connection = http.client.HTTPConnection(host, url.port, timeout=self.seconds)
        if url.scheme == "https":
            context = channels.tls_context(self.ca)
            connection = http.client.HTTPSConnection(host, url.port, timeout=self.seconds, context=context)

        def cut() -> None:
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

        try:
            with channels.hard_limit(self.seconds, cut), contextlib.closing(connection):
                connection.connect()
                path = (url.path or "/") + (f"?{url.query}" if url.query else "")
                connection.request("POST", path, payload, dict(headers))
                whole = True  # from here on the other side may have it
                with contextlib.closing(connection.getresponse()) as answer:
                    status, onward, wait = answer.status, answer.getheader("Location"), answer.getheader("Retry-After")
                    words = "" if status < 300 else channels.without_secrets(_words(answer), self._secrets(url))
        except (OSError, http.client.HTTPException, ValueError) as error:
            if whole:
                why = f"{host} took the message and gave no answer within {self.seconds:g} s ({type(error).__name__})."
                raise DeliveryError(DOUBT, why) from None
            why = channels.without_secrets(channels.reason_of(error), self._secrets(url))
            raise DeliveryError(LATER, f"{host} cannot be reached ({why}).") from None
        if 200 <= status < 300:
            return None
        if status in SAME_METHOD and onward:
            return onward
        if 300 <= status < 400:
            raise DeliveryError(REFUSED, f"{host} redirects (status {status}): write the address that it names.")
        outcome = LATER if status >= 500 or status in TRY_AGAIN else REFUSED
        raise DeliveryError(outcome, f"{host} answered {status}{': ' + words if words else ''}.", after=_wait(wait))

    def _secrets(self, url: SplitResult) -> list[str]:
        """Return what must not be repeated: the parts of the address after the host, and the user's headers."""
        parts = [
            part for known in (urlsplit(self.url), url) for part in re.split("[/&=]", f"{known.path}/{known.query}")
        ]
        return [*(part for part in parts if part.casefold() not in NO_SECRETS), *self.headers.values()]

    def _followed(self, url: str, onward: str) -> str:
        """Return the address of a redirect if it is on the same host, since another host could belong to anyone."""
        target = urljoin(url, onward)
        try:
            here, there = _split(url), _split(target)
        except ConfigError:
            raise DeliveryError(REFUSED, f"{_shown(url)} redirects to something that is no web address.") from None
        if (here.scheme, here.hostname, here.port) != (there.scheme, there.hostname, there.port):
            raise DeliveryError(
                REFUSED,
                f"{_shown(url)} redirects to {_shown(target)}, which is not followed: write that address instead.",
            )
        return target


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(channels.check_text("The url of an alert channel", url))
        port = parts.port
    except ValueError:
        raise ConfigError("The url of an alert channel is not a web address. Write https://host/path.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or " " in url:
        got = f"{parts.scheme}:" if parts.scheme else "none"
        raise ConfigError(
            f"An alert channel posts to http:// or https:// addresses, got {got}. Write https://host/path."
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "A url with a user or password in it is not accepted. Use headers = {Authorization = '${TOKEN}'}."
        )
    return parts


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}"


def _words(answer: http.client.HTTPResponse) -> str:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return answer.read(ANSWER).decode("utf-8", "replace").strip()[:200]
    return ""


def _wait(retry_after: str | None) -> float | None:
    return (
        min(float(retry_after), LONGEST_WAIT)
        if retry_after is not None and retry_after.isascii() and retry_after.isdigit()
        else None
    )
