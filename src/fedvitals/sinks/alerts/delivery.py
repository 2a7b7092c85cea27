# SPDX-License-Identifier: Apache-2.0
"""Delivers alerts to one channel: a bounded queue in memory, an outbox on disk, and a thread for anything slow.

Each channel has its own, so that a channel that hangs delays no other. An alert reaches a channel *at most once*: what
may have arrived is not sent again, but counted, logged, and mentioned in the channel's next message. A channel with
`again` receives it at least once instead.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedvitals.sinks.alerts.channels import DOUBT, LATER, Channel, DeliveryError
from fedvitals.sinks.alerts.message import Alert, Message
from fedvitals.sinks.alerts.outbox import DOUBTFUL, LOST, SENT, Outbox

logger = logging.getLogger("fedvitals.telemetry")

QUEUE = 1000  # alerts in memory, before the thread has stored them
GROUP = 50  # alerts in one message
LINGER_SECONDS = 0.5  # the alerts of one round arrive within a moment of each other
FIRST_DELAY, LONGEST_DELAY = 1.0, 300.0  # seconds between attempts, doubling, each ± half
PATIENCE_SECONDS = 86_400.0  # after which an alert is given up
IDLE_SECONDS = 60.0
CAUSES_REPORTED = 20


class ChannelDelivery:
    """Accepts alerts without waiting, and delivers them to one channel from its own thread."""

    def __init__(self, channel: Channel, folder: Path | None, *, group: bool = True) -> None:
        self._channel, self._folder, self._most = channel, folder, GROUP if group else 1
        self._changed = threading.Condition()
        self._new: deque[tuple[Alert, bool]] = deque()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._stopping = False
        self._deadline = 0.0
        self._lost: dict[str, int] = {}
        self._doubts = 0  # not yet mentioned to the channel
        self._reported: set[str] = set()
        self.sent = 0

    @property
    def lost(self) -> Mapping[str, int]:
        """The number of alerts that did not reach the channel, or may not have, by cause."""
        with self._changed:
            return dict(self._lost)

    def start(self) -> None:
        """Start the thread; it begins with what an earlier process left in the outbox."""
        with self._changed:
            if self._thread is None and not self._stopping:
                name = f"fedvitals-alerts-{self._channel.name}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                # Without a thread (the system's limit is reached) alerts wait; the next alert tries again.
                with contextlib.suppress(RuntimeError):
                    self._busy = True
                    thread.start()
                    self._thread = thread

    def put(self, alert: Alert, *, silent: bool = False) -> None:
        """Accept an alert without waiting or raising. `silent`: only record it for the next process, do not send it."""
        with self._changed:
            if self._stopping or len(self._new) >= QUEUE:
                self._lose("courier ended" if self._stopping else "queue full", 1)
                return
            self._new.append((alert, silent))
            self._changed.notify_all()
        self.start()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until everything so far is delivered, given up, or waiting for a retry. Returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None or not (self._new or self._busy), timeout)

    def stop(self, timeout: float) -> None:
        """Try once more to send what is waiting, within `timeout`; the rest stays on disk for the next process."""
        with self._changed:
            self._stopping, self._deadline = True, time.monotonic() + timeout
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread to end, about as long as `stop` allowed; an attempt that hangs is abandoned."""
        with self._changed:
            thread = self._thread
        if thread is not None:
            thread.join(max(0.2, self._deadline - time.monotonic()))

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        outbox = self._open()
        try:
            while True:
                try:
                    if not self._wait(outbox):
                        break
                    self._advance(outbox)
                except sqlite3.Error as error:
                    outbox = self._recover(outbox, error)
            if not outbox.on_disk and (left := outbox.waiting()):
                self._count_lost("not delivered by the end of the run", left)
        except Exception as error:  # noqa: BLE001 - training goes on, and the log shows that alerts do not
            self._report(f"it ends here, by {type(error).__name__}: {error}")
        finally:
            outbox.close()
            with self._changed:
                self._lose("courier ended", len(self._new))
                self._new.clear()
                self._thread, self._busy, self._stopping = None, False, True
                self._changed.notify_all()

    def _recover(self, outbox: Outbox, error: sqlite3.Error) -> Outbox:
        """Return the same outbox if another process merely held it; one in memory if the disk is full or gone."""
        if "locked" in str(error) or "busy" in str(error):
            self._report(f"the outbox is held by another process ({error}), and is tried again")
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, FIRST_DELAY)
                if self._stopping and time.monotonic() > self._deadline:
                    raise error
            return outbox
        if not outbox.on_disk:
            raise error
        self._report(f"the outbox fails ({error}), so what is new would not survive a restart")
        outbox.close()
        return Outbox(None, self._channel.identity)

    def _open(self) -> Outbox:
        try:
            return Outbox(self._folder, self._channel.identity)
        except (OSError, sqlite3.Error) as error:
            self._report(f"{self._folder} cannot hold what waits ({error}), so alerts would not survive a restart")
            return Outbox(None, self._channel.identity)

    def _wait(self, outbox: Outbox) -> bool:
        """Sleep until there is something to do. Returns False when the thread should end."""
        due = outbox.next_due()
        with self._changed:
            if not self._new and not self._stopping and (due is None or due > time.time()):
                self._busy = False
                self._changed.notify_all()
                self._changed.wait(IDLE_SECONDS if due is None else min(IDLE_SECONDS, max(0.01, due - time.time())))
            self._busy = True
            fresh = bool(self._new)
            if not self._stopping and fresh:
                self._changed.wait_for(lambda: self._stopping, LINGER_SECONDS)
            ended = self._stopping and not self._new
        if ended:
            self._last_attempts(outbox)
        return not ended

    def _advance(self, outbox: Outbox) -> None:
        """Store new alerts, and send those that are due."""
        with self._changed:
            new = list(self._new)
        refused = outbox.add([alert for alert, silent in new if not silent])
        outbox.add([alert for alert, silent in new if silent], silent=True)
        if refused:
            self._count_lost("outbox full", refused)
        with self._changed:
            for _ in new:
                self._new.popleft()
        old, dead = outbox.expire(PATIENCE_SECONDS, again=self._channel.again)
        if old:
            self._count_lost("given up after a day", old)
        if dead:
            self._doubt(dead, "the process that sent them died")
        while not self._stopping:
            alerts = outbox.claim(self._most, self._channel.seconds)
            if not alerts:
                return
            self._send(outbox, alerts)

    def _last_attempts(self, outbox: Outbox) -> None:
        """Give each alert one last attempt, whenever it would have been due."""
        most = outbox.waiting()
        tried = 0
        while tried < most and time.monotonic() < self._deadline:
            alerts = outbox.claim(self._most, self._channel.seconds, everything=True)
            if not alerts or not self._send(outbox, alerts):
                return
            tried += len(alerts)

    def _send(self, outbox: Outbox, alerts: Sequence[Alert]) -> bool:
        """Send alerts. Returns whether the channel accepted them; otherwise, the outcome is recorded."""
        with self._changed:
            doubts = self._doubts
        try:
            self._channel.send(Message(tuple(alerts), doubts))
        except DeliveryError as error:
            self._not_sent(outbox, alerts, error)
            return False
        except Exception as error:  # noqa: BLE001 - a user-defined channel may fail in any way
            # How far it got is unknown. Its message may contain an address or a header with a secret.
            why = f"send() of {type(self._channel).__name__} raised {type(error).__name__}"
            self._not_sent(outbox, alerts, DeliveryError(DOUBT, why))
            return False
        outbox.settle(alerts, SENT)
        with self._changed:
            self._doubts -= doubts
            self.sent += len(alerts)
        return True

    def _not_sent(self, outbox: Outbox, alerts: Sequence[Alert], error: DeliveryError) -> None:
        if error.outcome == LATER or (error.outcome == DOUBT and self._channel.again):
            delay = min(FIRST_DELAY * 2 ** min(outbox.attempts(alerts) - 1, 20), LONGEST_DELAY)
            delay *= random.uniform(0.5, 1.5)  # noqa: S311 - so that many do not return at once
            outbox.postpone(alerts, max(delay, error.after or 0.0), str(error), together=error.outcome == DOUBT)
            self._report(f"{error} It is tried again")
        elif error.outcome == DOUBT:
            outbox.settle(alerts, DOUBTFUL, str(error))
            self._doubt(len(alerts), str(error))
        else:
            outbox.settle(alerts, LOST, str(error))
            self._count_lost("refused", len(alerts), str(error))

    # --- what is reported --------------------------------------------------------------------------------------------

    def _doubt(self, count: int, why: str) -> None:
        with self._changed:
            self._doubts += count
        self._count_lost("in doubt", count, why)

    def _count_lost(self, cause: str, count: int, why: str = "") -> None:
        with self._changed:
            self._lose(cause, count)
        self._report(f"{count} alerts: {cause}{'; ' + why if why else ''}", cause + why)

    def _lose(self, cause: str, count: int) -> None:
        if count:
            self._lost[cause] = self._lost.get(cause, 0) + count

    def _report(self, what: str, cause: str = "") -> None:
        """Log once per cause: an outage must not fill the user's log."""
        cause = cause or what
        if cause in self._reported or len(self._reported) >= CAUSES_REPORTED:
            return
        self._reported.add(cause)
        with contextlib.suppress(Exception):  # the user's log handler may fail
            logger.warning("Alert channel '%s': %s. Logged once; `lost` counts.", self._channel.name, what.rstrip("."))
