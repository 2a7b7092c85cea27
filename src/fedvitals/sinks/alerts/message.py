# SPDX-License-Identifier: Apache-2.0
"""Alerts and messages, and their text for people and programs.

Names of nodes, runs and issues, and the text of findings, may come from a hostile machine. Here they are cut to a
maximum length, stripped of characters that move a cursor or end a line, and can neither mention a whole channel nor
plant a link.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fedvitals import plain_json
from fedvitals.catalog import unit_of
from fedvitals.errors import RecordError

FIRING, RESOLVED = "firing", "resolved"
LINES = 20  # alerts in the text of one message; the rest is counted, and included in the JSON
WORDS = 400  # characters of one sentence
NAME = 80  # characters of a node's or run's name
TEXT = 1900  # characters of one message: Discord accepts 2000
ZERO_WIDTH = "\u200b"


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule that began to hold at one place, or that no longer holds."""

    run: str
    rule: str
    place: str  # node, group, layer and issue as JSON: what distinguishes two alerts of one rule
    onset: int  # the round in which it began
    kind: str  # «firing» or «resolved»
    severity: str
    round: int  # in which this is reported
    at: float
    message: str
    node: str | None = None
    group: str | None = None
    layer: str | None = None
    issue: str | None = None
    metric: str | None = None
    value: float | None = None
    limit: float | None = None
    others: int = 0  # further rules that the same finding broke at the same moment, and that stay silent

    @property
    def id(self) -> str:
        """A digest of run, rule, place, onset and kind; the same alert keeps it after a restart."""
        identity = json.dumps([self.run, self.rule, self.place, self.onset, self.kind])
        return hashlib.blake2b(identity.encode("utf-8", "backslashreplace"), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class Message:
    """Alerts for one channel, as text. `key` is the same whenever the same alerts are sent."""

    alerts: tuple[Alert, ...]
    doubtful: int = 0  # earlier alerts to this channel that may not have arrived
    test: str = ""  # what distinguishes a test message from others

    @property
    def key(self) -> str:
        """A digest of the alerts, the same for every attempt."""
        identities = " ".join((*(alert.id for alert in self.alerts), self.test))
        return hashlib.blake2b(identities.encode(), digest_size=16).hexdigest()

    @property
    def subject(self) -> str:
        """One line: what, where, and how severe."""
        if self.test:
            return "[fedvitals] test message"
        worst = max(self.alerts, key=_rank)
        more = f" and {len(self.alerts) - 1} more" if len(self.alerts) > 1 else ""
        return harmless(f"[fedvitals] {_badge(worst)}: {title(worst)}{more}", 150)

    @property
    def lines(self) -> list[str]:
        """The text line by line, harmless in any program that shows it literally."""
        if self.test:
            return ["fedvitals: this is a test. Alerts of your federated training will arrive here."]
        runs = list(dict.fromkeys(harmless(alert.run, NAME) for alert in self.alerts))
        lines = [f"fedvitals, run {', '.join(runs)}:"]
        lines += [
            f"{_badge(alert)}, round {alert.round}: {harmless(alert.message, WORDS)}" for alert in self.alerts[:LINES]
        ]
        if len(self.alerts) > LINES:
            lines.append(f"and {len(self.alerts) - LINES} more")
        if self.doubtful:
            many = self.doubtful != 1
            lines.append(f"{self.doubtful} earlier alert{'s' * many} to this channel may not have arrived.")
        return lines


def as_json(message: Message) -> dict[str, Any]:
    """Return the message for programs: {"key", "test", "doubtful", "alerts": [...]}; numbers that are not finite are
    null.
    """
    return {
        "key": message.key,
        "test": bool(message.test),
        "doubtful": message.doubtful,
        "alerts": [alert_json(alert) for alert in message.alerts],
    }


def alert_json(alert: Alert) -> dict[str, Any]:
    """Return an alert for programs."""
    plain = plain_json.shown(alert)
    del plain["place"]
    plain |= {name: harmless(str(plain[name]), NAME) for name in ("node", "group", "layer", "issue") if plain[name]}
    return {"id": alert.id, **plain, "message": harmless(alert.message, WORDS), "run": harmless(alert.run, NAME)}


def to_line(alert: Alert) -> str:
    """Encode an alert for the outbox; `from_line` decodes it."""
    return json.dumps(asdict(alert))


def from_line(line: str) -> Alert:
    """Decode what `to_line` encoded."""
    try:
        stored = json.loads(line)
        return Alert(**{field.name: stored[field.name] for field in fields(Alert) if field.name in stored})
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"An alert in the outbox cannot be read ({type(error).__name__}): {line[:80]!r}") from error


def title(alert: Alert) -> str:
    """Return a short title: what the rule asks, and where."""
    what = alert.issue or alert.rule
    return f"{what} at {alert.node or alert.group or 'the whole run'}"


def harmless(text: str, limit: int) -> str:
    """Return text as one short line, without characters that move a cursor, end a header or reverse the direction."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else "?" for c in cut).encode("utf-8", "backslashreplace").decode()


def for_slack(lines: Sequence[str]) -> str:
    """Escape text for Slack, so that `<!channel>`, `<@U1>` and `<http://...|here>` are shown literally."""
    escaped = "\n".join(lines).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _cut(_defanged(escaped))


def for_discord(lines: Sequence[str]) -> str:
    """Escape Markdown for Discord, so that `@everyone`, `<@1>` and `[here](http://...)` are shown literally."""
    text = "".join("\\" + c if c in "\\*_~`|<>#[]()" else c for c in "\n".join(lines))
    return _cut(_defanged(text))


def _defanged(text: str) -> str:
    return text.replace("@", "@" + ZERO_WIDTH).replace("://", ":" + ZERO_WIDTH + "//")


def _cut(text: str) -> str:
    return text if len(text) <= TEXT else text[: TEXT - 1].rstrip("\\") + "…"


def value_text(value: float, metric: str) -> str:
    """Return a value in its metric's unit, formatted for people."""
    unit = unit_of(metric)
    if math.isnan(value):
        return "NaN"
    if unit == "share" and math.isfinite(value):
        return f"{100 * value:.3g} %"
    if unit == "seconds":
        return f"{value:.4g} s"
    if unit == "bytes" and math.isfinite(value):
        for factor, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if abs(value) >= factor:
                return f"{value / factor:.4g} {name}"
        return f"{value:.4g} B"
    return f"{value:.4g}"


def _badge(alert: Alert) -> str:
    return "resolved" if alert.kind == RESOLVED else alert.severity


def _rank(alert: Alert) -> tuple[bool, int]:
    order = ("note", "warning", "critical")
    return alert.kind == FIRING, order.index(alert.severity) if alert.severity in order else -1
