# SPDX-License-Identifier: Apache-2.0
"""Alerts: a sink that holds every record against rules, and tells people by webhook, e-mail, command or file.

    fv.Monitor("runs.db", sinks=[Alerts("alerts.toml")])
    Alerts(rules=["accuracy < 0.8 for 5 rounds", "finding in client"], channels=[File("alerts.jsonl")])

Judging happens on the sink's worker, delivery on a thread of each channel's own: neither training nor other sinks wait.
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
from fedvitals.protocols import Sink
from fedvitals.records import (
    Action,
    Event,
    Finding,
    LayerStats,
    Metric,
    Record,
    Sketch,
    Snapshot,
    Span,
    Transfer,
    Truth,
    run_of,
)
from fedvitals.sinks.alerts.channels import Channel, Command, DeliveryError, File
from fedvitals.sinks.alerts.config import check_channels, load, rules_of
from fedvitals.sinks.alerts.delivery import Courier
from fedvitals.sinks.alerts.email import Email
from fedvitals.sinks.alerts.message import RESOLVED, Alert, Message
from fedvitals.sinks.alerts.once import Once
from fedvitals.sinks.alerts.outbox import open_alerts, path_in
from fedvitals.sinks.alerts.rules import Found, Rule, rule, unknown_names
from fedvitals.sinks.alerts.watch import Watch
from fedvitals.sinks.alerts.webhook import Webhook

__all__ = ["Alert", "Alerts", "Command", "DeliveryError", "Email", "File", "Message", "Rule", "Webhook", "rule"]

logger = logging.getLogger("fedvitals.telemetry")

MOST_RUNS = 8  # that one sink watches at a time
CLOSE_SECONDS = 5.0


class Alerts(Sink):
    """Tells channels when a rule begins to hold, and when it no longer does; each alert at most once per channel.

    `config`: an alerts.toml; or `rules` (texts, tables or `rule(...)`) and `channels`. What waits lies in `folder`, by
    default beside the store, else beside the file; without either it is kept in memory, and a restart forgets it.
    `families`: the family of each issue, which the monitor tells; a rule «finding in FAMILY» needs it.
    """

    name = "alerts"
    ignores = (LayerStats, Span, Transfer, Event, Sketch, Action, Snapshot, Truth)  # see `transport.sink_writer`

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
        rules_of(self.rules)  # those of the file and these together: no two of one name
        check_channels(self.rules, [channel.name for channel in self.channels])
        self._folder, self._families = own, families
        self._beside = None if config is None else Path(f"{os.fspath(Path(config).expanduser())}.d")
        self._watches: dict[str, Watch] = {}
        self._once = Once(self.rules, [channel.name for channel in self.channels])
        self._couriers: dict[str, Courier] | None = None  # made at the first record: nothing is opened before
        self._silent = {one.name for one in self.rules if not one.resolved}
        self._warned = False
        self._gone: dict[str, int] = {}  # lost by couriers that have ended

    def prepare(self, folder: Path | None = None, families: Mapping[str, str] | None = None) -> None:
        """What the monitor tells before the first record: the folder beside the store, and each issue's family."""
        self._beside = folder or self._beside
        if self._families is None and families is not None:
            self._families = families
            for said in unknown_names(self.rules, families):
                logger.warning("%s", said)

    def write(self, records: Sequence[Record], /) -> None:
        self._start()
        for record in records:
            if isinstance(record, Metric | Finding):
                self._watch(run_of(record)).see(record)
        for watch in self._watches.values():
            self._send(watch.alerts())

    def flush(self, timeout: float = 10.0) -> bool:
        """Whether every alert so far is delivered, given up, or waits for another attempt."""
        done = [courier.flush(timeout) for courier in (self._couriers or {}).values()]  # each, whatever another says
        return all(done)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """The last alerts, and a last attempt at what waits. What does not get through stays in the folder."""
        for watch in self._watches.values():
            self._send(watch.finish())
        for run in self._watches:
            self._once.end(run)
        self._watches.clear()
        couriers = list((self._couriers or {}).values())
        for courier in couriers:
            courier.stop(timeout)
        for courier in couriers:
            courier.join()
        lost = self._gone = dict(self.lost)
        self._couriers = None  # another run may follow
        if lost:
            told = ", ".join(f"{count} {cause}" for cause, count in lost.items())
            logger.warning("Alerts that did not arrive, or may not have: %s.", told)

    @property
    def lost(self) -> Mapping[str, int]:
        """How many alerts did not reach a channel, or may not have, by cause."""
        sums = dict(self._gone)
        for courier in (self._couriers or {}).values():
            for cause, count in courier.lost.items():
                sums[cause] = sums.get(cause, 0) + count
        return sums

    @property
    def folder(self) -> Path | None:
        """Where alerts wait that could not be delivered yet."""
        return self._folder or self._beside

    def _start(self) -> None:
        if self._couriers is not None:
            return
        self._couriers = {one.name: Courier(one, self.folder, group=self._group) for one in self.channels}
        if self.folder is not None and path_in(self.folder).exists():
            for courier in self._couriers.values():
                courier.start()  # with what an earlier process left

    def _watch(self, run: str) -> Watch:
        watch = self._watches.get(run)
        if watch is None:
            if len(self._watches) >= MOST_RUNS:
                oldest = next(iter(self._watches))
                self._send(self._watches.pop(oldest).finish())
                self._once.end(oldest)
            told: list[tuple[str, str, int]] = []
            with contextlib.suppress(sqlite3.Error, OSError):  # then it may be told twice, which is better than never
                told = open_alerts(self.folder, run)
            self._once.begin(run, told)
            watch = self._watches[run] = Watch(run, self.rules, families=self._families, open_alerts=told)
        return watch

    def _send(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            silent = alert.kind == RESOLVED and alert.rule in self._silent
            for name in self._once.channels(alert):
                if self._couriers is not None:
                    self._couriers[name].put(alert, silent=silent)
        self._warn()

    def _warn(self) -> None:
        """Once: what no rule can see."""
        if self._warned:
            return
        left_out = sum(watch.left_out for watch in self._watches.values())
        blind = self._families is None and any(isinstance(r.when, Found) and r.when.family for r in self.rules)
        if left_out:
            logger.warning("Alerts watch at most 10,000 nodes for each rule; what is beyond is left out.")
        if blind:
            logger.warning(
                "Alert rules «finding in FAMILY» match nothing: Alerts(families=...) says which issue is in which."
            )
        self._warned = bool(left_out or blind)
