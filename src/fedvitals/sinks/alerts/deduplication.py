# SPDX-License-Identifier: Apache-2.0
"""Sends one message per case and channel, even if several rules match: the first matching rule sends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedvitals.sinks.alerts.message import RESOLVED, Alert
from fedvitals.sinks.alerts.rules import SEVERITIES, Rule


class CaseDeduplication:
    """Remembers which rule reported a case on each channel. A rule that reports a higher severity is sent as well."""

    def __init__(self, rules: Iterable[Rule], channels: Sequence[str]) -> None:
        self._wanted = {rule.name: rule.channels or tuple(channels) for rule in rules}
        self._channels = tuple(channels)
        self._speaks: dict[tuple[str, str, str], tuple[str, str]] = {}  # channel, run, place → rule, severity

    def begin(self, run: str, open_alerts: Iterable[tuple[str, str, int]]) -> None:
        """Take over the alerts (rule, place, onset) that an earlier process sent and that are still open."""
        order = list(self._wanted)
        known = [(rule, place) for rule, place, _ in open_alerts if rule in self._wanted]
        for rule, place in sorted(known, key=lambda rule_and_place: order.index(rule_and_place[0])):
            for channel in self._wanted[rule]:
                self._speaks.setdefault((channel, run, place), (rule, SEVERITIES[-1]))

    def end(self, run: str) -> None:
        """Forget a run."""
        self._speaks = {key: speaker for key, speaker in self._speaks.items() if key[1] != run}

    def channels(self, alert: Alert) -> list[str]:
        """Return the channels that should receive an alert, in their order."""
        wanted = [name for name in self._channels if name in self._wanted[alert.rule]]
        return wanted if alert.issue is None else [name for name in wanted if self._is_news(name, alert)]

    def _is_news(self, channel: str, alert: Alert) -> bool:
        key = (channel, alert.run, alert.place)
        rule, severity = self._speaks.get(key, (alert.rule, ""))
        if alert.kind == RESOLVED:
            return rule == alert.rule and self._speaks.pop(key, None) is not None
        if rule != alert.rule and _rank(alert.severity) <= _rank(severity):
            return False
        self._speaks[key] = (alert.rule, alert.severity)
        return True


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else -1
