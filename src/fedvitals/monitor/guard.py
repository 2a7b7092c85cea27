# SPDX-License-Identifier: Apache-2.0
"""Keeps monitoring errors out of the training code: they are reported once per cause, and raised only if `strict`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from fedvitals.diagnosis.gaps import MonitorFailure
from fedvitals.errors import UnsuitedError, text_of
from fedvitals.monitor.emission import Emission
from fedvitals.monitor.run_context import RunContext
from fedvitals.monitor.scopes import ClientThreads, Scopes
from fedvitals.protocols import Node
from fedvitals.records import Event
from fedvitals.scope import Scope
from fedvitals.transport.privacy import SERVER, released
from fedvitals.transport.recorder import where

logger = logging.getLogger("fedvitals")
ABSTAINS = "probe.abstains"  # the event that says what a probe does not measure, and why
INTERRUPTIONS = (KeyboardInterrupt, GeneratorExit)  # somebody ended the training; nothing in it failed
CAUSES_REPORTED, CAUSES_OF_CLIENT = 100, 10  # bounds the log, because a message may differ each time


class Guard:
    """Runs monitoring work so that its failure never stops the training.

    Called with work, it returns its result, or None if it failed. `failures` lists what failed, each cause once.
    """

    def __init__(
        self, context: RunContext, threads: ClientThreads, scopes: Scopes, emission: Emission, *, strict: bool
    ) -> None:
        self._context, self._threads, self._scopes, self._emission = context, threads, scopes, emission
        self.strict = strict
        self.failures: list[MonitorFailure] = []
        self._reported: dict[Node | None, set[str]] = {}  # causes reported, by the node they concern
        self._causes: set[str] = set()  # all causes

    def __call__(self, doing: str, work: Callable[[], Any], scope: Scope | None = None) -> Any:
        """Return what `work` returns, or None if it raised. `doing` names the work in the report."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the one promise of this project
            self.report(error, doing, scope)
            return None

    def attempt(
        self, doing: str, work: Callable[[], Any], node: Node | None = None, *, here: Callable[[Node | None], Scope]
    ) -> Any:
        """Run work about one node, or about none, and report failures per node. `here` returns a node's scope."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - as above
            self.report(error, doing, here(node), each=True)
            return None

    def exception(self, scope: Scope, name: str, error: BaseException) -> None:
        """Record an exception of the training code inside a scope, as an event.

        An interruption such as Ctrl-C is not a failure: it is recorded once, in the innermost scope that it leaves.
        """
        if not isinstance(error, INTERRUPTIONS):
            self(name, lambda: self._emission.record.exception(scope, name, error), scope)
        elif self._context.run.id not in (runs := error.__dict__.setdefault("fedvitals_runs", set())):
            runs.add(self._context.run.id)
            text, data = "The training was interrupted here.", {"exception": type(error).__name__}
            self(name, lambda: self._emission.record.event(scope, "warning", "interrupted", text, data), scope)

    def report(self, error: Exception, doing: str, scope: Scope | None = None, *, each: bool = False) -> None:
        """Report a monitoring error once per cause (with `each`: per cause and node), in `scope` or the caller's scope.

        Each client has a quota of causes, so one whose data fail in ever new ways cannot suppress the reports of
        others. A probe that abstains has not failed: that is only recorded as an event of level «info».
        """
        abstains = isinstance(error, UnsuitedError)
        if self.strict and not abstains:
            raise error
        kind = type(error).__name__
        cause = f"{doing}: {kind}: {text_of(error)}"[:1000]
        place, data = where(scope or self._scopes.here()), {"doing": doing, "exception": kind}
        own = self._reported.setdefault(place.node, set())
        first = cause not in self._causes
        # The first of each kind is always reported, because it may be why the run is not judged.
        known = any(failure.doing == doing for failure in self.failures)
        most = (CAUSES_REPORTED if place.node in SERVER else CAUSES_OF_CLIENT) * (1 if known else 10)
        if len(own) >= most or cause in own or not (first or each):
            return
        own.add(cause)
        self._causes.add(cause)
        if abstains:
            self._emission.emit_if_open(Event(place, time.time(), "info", ABSTAINS, str(error)[:1000], data))
            return
        self.failures.append(MonitorFailure(doing, kind, place.round, place.node))
        event = Event(place, time.time(), "warning", "monitor.error", cause, data)
        # The log leaves the process too: the error may come from the client's own code and quote its data.
        allowed = released(event, self._context.policy, stray=self._threads.may_be_client())
        text = allowed.message if isinstance(allowed, Event) else doing
        about = "" if place.node in SERVER else f" (client '{place.node}')"
        if first:
            logger.warning("fedvitals could not finish %s%s; training goes on.", text, about)
        self._emission.emit_if_open(event)
