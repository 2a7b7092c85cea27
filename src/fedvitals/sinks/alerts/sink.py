# SPDX-License-Identifier: Apache-2.0
"""A sink that evaluates alert rules on every record, and notifies people by webhook, e-mail, command or file.

    fv.Monitor("runs.db", sinks=[Alerts("alerts.toml")])
    Alerts(rules=["accuracy < 0.8 for 5 rounds", "finding in client"], channels=[File("alerts.jsonl")])

Rules are evaluated on the sink's worker, and each channel delivers on its own thread: neither training nor other sinks
wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvitals.errors import ConfigError
from fedvitals.measurements import run_of
from fedvitals.protocols import Sink
from fedvitals.records import Finding, Metric, Record
from fedvitals.sinks.alerts.channels import Channel, Command, DeliveryError, File
from fedvitals.sinks.alerts.config import check_channels, load, rules_of
from fedvitals.sinks.alerts.delivery import ChannelDelivery
from fedvitals.sinks.alerts.email import Email
from fedvitals.sinks.alerts.evaluation import CaseDeduplication, RuleEvaluation
from fedvitals.sinks.alerts.message import RESOLVED, Alert, Message
from fedvitals.sinks.alerts.outbox import open_alerts, path_in
from fedvitals.sinks.alerts.rules import FindingCondition, Rule, rule, unknown_names
from fedvitals.sinks.alerts.webhook import Webhook
from fedvitals.sinks.spread import all_but

__all__ = ["Alert", "Alerts", "Command", "DeliveryError", "Email", "File", "Message", "Rule", "Webhook", "rule"]

logger = logging.getLogger("fedvitals.telemetry")

MOST_RUNS = 8  # watched by one sink at a time
CLOSE_SECONDS = 5.0


class Alerts(Sink):
    """A sink that notifies channels when a rule begins to hold and when it no longer does, at most once per channel.

    Undelivered alerts wait in `folder` and are retried. Without a folder they are kept in memory, and lost at a
    restart.

    Args:
        config: Path of an alerts.toml with rules and channels; those of `rules` and `channels` are added to them.
        rules: Rules as text («accuracy < 0.8 for 5 rounds»), as tables, or made by `fv.sinks.rule`.
        channels: Where alerts go: `fv.sinks.File`, `Command`, `Webhook`, `Email`.
        group: Whether several alerts that wait may be sent as one message; with `config`, the file decides.
        folder: Where undelivered alerts wait; by default beside the store or, without one, beside `config`.
        families: The family of each issue, for rules such as «finding in client»; the monitor passes it.
    """

    name = "alerts"
    ignores = all_but(Finding, Metric)  # see `transport.sink_writer`

    def __init__(
        self,
        config: str | os.PathLike[str] | None = None,
        *,
        rules: Sequence[str | Mapping[str, Any] | Rule] = (),
        channels: Sequence[Channel] = (),
        group: bool = True,
        folder: str | os.PathLike[str] | None = None,
        families: Mapping[str, str] | None = None,
    ) -> None:
        own = None if folder is None else Path(folder).expanduser()
        if config is not None:
            plan = load(config)
            self.rules, self.channels, self._group = (*plan.rules, *rules_of(rules)), plan.channels, plan.group
            self.channels += tuple(channels)
            own = own or plan.folder
        else:
            self.rules, self.channels, self._group = rules_of(rules), tuple(channels), group
        if not self.rules:
            raise ConfigError(
                'Alerts need a rule: Alerts("alerts.toml"), or Alerts(rules=["accuracy < 0.8"], channels=...).'
            )
        rules_of(self.rules)  # checks that the file's rules and these have distinct names
        check_channels(self.rules, [channel.name for channel in self.channels])
        self._folder, self._families = own, families
        self._beside = None if config is None else Path(f"{os.fspath(Path(config).expanduser())}.d")
        self._evaluations: dict[str, RuleEvaluation] = {}
        self._deduplication = CaseDeduplication(self.rules, [channel.name for channel in self.channels])
        # Created at the first record: nothing is opened before
        self._deliveries: dict[str, ChannelDelivery] | None = None
        self._silent = {rule_.name for rule_ in self.rules if not rule_.resolved}
        self._warned = False
        self._gone: dict[str, int] = {}  # lost by deliveries that have ended

    def prepare(self, folder: Path | None = None, families: Mapping[str, str] | None = None) -> None:
        """Called by the monitor before the first record, with the folder beside the store and each issue's family.

        Args:
            folder: The folder beside the store, where undelivered alerts may wait.
            families: The family of each issue.
        """
        self._beside = folder or self._beside
        if self._families is None and families is not None:
            self._families = families
            for remark in unknown_names(self.rules, families):
                logger.warning("%s", remark)

    def write(self, records: Sequence[Record], /) -> None:
        """Evaluate the rules on these records, and queue the alerts that follow.

        Args:
            records: The records that the monitor has produced since the last call.
        """
        self._start()
        for record in records:
            if isinstance(record, Metric | Finding):
                self._evaluation_of(run_of(record)).see(record)
        for evaluation in self._evaluations.values():
            self._send(evaluation.alerts())

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until every alert so far has been delivered, abandoned, or scheduled for another attempt.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            Whether that happened in time.
        """
        done = [
            delivery.flush(timeout) for delivery in (self._deliveries or {}).values()
        ]  # each, whatever another says
        return all(done)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Send the last alerts and retry those that wait. Undelivered alerts stay in the folder.

        Args:
            timeout: Seconds to wait at most.
        """
        for evaluation in self._evaluations.values():
            self._send(evaluation.finish())
        for run in self._evaluations:
            self._deduplication.end(run)
        self._evaluations.clear()
        deliveries = list((self._deliveries or {}).values())
        for delivery in deliveries:
            delivery.stop(timeout)
        for delivery in deliveries:
            delivery.join()
        lost = self._gone = dict(self.lost)
        self._deliveries = None  # another run may follow
        if lost:
            losses = ", ".join(f"{count} {cause}" for cause, count in lost.items())
            logger.warning("Alerts that did not arrive, or may not have: %s.", losses)

    @property
    def lost(self) -> Mapping[str, int]:
        """The number of alerts that did not reach a channel, or may not have, by cause."""
        sums = dict(self._gone)
        for delivery in (self._deliveries or {}).values():
            for cause, count in delivery.lost.items():
                sums[cause] = sums.get(cause, 0) + count
        return sums

    @property
    def folder(self) -> Path | None:
        """The folder where undelivered alerts wait; None while they are kept in memory only."""
        return self._folder or self._beside

    def _start(self) -> None:
        if self._deliveries is not None:
            return
        self._deliveries = {
            channel.name: ChannelDelivery(channel, self.folder, group=self._group) for channel in self.channels
        }
        if self.folder is not None and path_in(self.folder).exists():
            for delivery in self._deliveries.values():
                delivery.start()  # including what an earlier process left

    def _evaluation_of(self, run: str) -> RuleEvaluation:
        evaluation = self._evaluations.get(run)
        if evaluation is None:
            if len(self._evaluations) >= MOST_RUNS:
                oldest = next(iter(self._evaluations))
                self._send(self._evaluations.pop(oldest).finish())
                self._deduplication.end(oldest)
            known_alerts: list[tuple[str, str, int]] = []
            # It may then be reported twice, which is better than never
            with contextlib.suppress(sqlite3.Error, OSError):
                known_alerts = open_alerts(self.folder, run)
            self._deduplication.begin(run, known_alerts)
            evaluation = self._evaluations[run] = RuleEvaluation(
                run, self.rules, families=self._families, open_alerts=known_alerts
            )
        return evaluation

    def _send(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            silent = alert.kind == RESOLVED and alert.rule in self._silent
            for name in self._deduplication.channels(alert):
                if self._deliveries is not None:
                    self._deliveries[name].put(alert, silent=silent)
        self._warn()

    def _warn(self) -> None:
        """Warn once about what no rule can see."""
        if self._warned:
            return
        left_out = sum(evaluation.left_out for evaluation in self._evaluations.values())
        blind = self._families is None and any(
            isinstance(r.when, FindingCondition) and r.when.family for r in self.rules
        )
        if left_out:
            logger.warning("Alerts watch at most 10,000 nodes for each rule; the others are left out.")
        if blind:
            logger.warning(
                "Alert rules «finding in FAMILY» match nothing: Alerts(families=...) says which issue is in which."
            )
        self._warned = bool(left_out or blind)
