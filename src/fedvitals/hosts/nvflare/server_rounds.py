# SPDX-License-Identifier: Apache-2.0
"""Report an NVFlare server job's rounds to a monitor: which sites were asked, which answered, when, and with what.

Sites are identified by the names that NVFlare's server has authenticated. Events come on many threads. Nothing here may
stop or change the job: a failure of ours is reported once, and the result is passed on unchanged.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvflare.apis.shareable import Shareable

from fedvitals.diagnosis.corrections.followed import FollowedCorrections
from fedvitals.hosts import array_models, participation
from fedvitals.hosts.array_models import ArrayOutline, ReusableVectors, Values, new_outline
from fedvitals.hosts.background_work import BackgroundWork
from fedvitals.hosts.metric_names import with_known_names
from fedvitals.hosts.nvflare import models
from fedvitals.hosts.participation import PhaseParticipation
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Action
from fedvitals.resources.node_spans import covered

TRAIN, EVALUATE = "train", "evaluate"
EVALUATION_TASKS = ("validate", "evaluate", "cross_validate")
UNANSWERED_KEPT = 10_000  # unanswered tasks remembered
MOST_WAITING = 4  # updates waiting to be measured; further ones are measured at once, to limit memory


@dataclass(slots=True)
class SiteRequest:
    """A task that a site has fetched, or should fetch."""

    node: str
    phase: str
    round_index: int
    sent: float
    size: int
    data: Shareable | None = None  # what it was sent
    fetched: bool = True
    returned: float | None = None  # when its result arrived
    failed: bool = False  # whether the site reported its failure by a message before any result


class ServerRounds:
    """Follows the rounds of one job. `job_id`: NVFlare's id. `hides`: whether a filter keeps single sites hidden."""

    def __init__(self, monitor: Monitor, job_id: str, *, guard_mode: str, hides: bool = False) -> None:
        self.monitor, self.job_id, self.guard_mode, self.hides = monitor, job_id, guard_mode, hides
        self.round_index: int | None = None  # of the open round
        self._last = -1  # the newest round that has begun
        self.start: dict[str, Values] | None = None  # the model that the open round began with
        self.corrections = FollowedCorrections[Any](monitor.host, _obstacle)
        self._announced: int | None = None  # a round that began before its model was known
        self._newest: dict[str, Values] | None = None  # the round's aggregate, once known
        self._outline: Any = None
        self._metrics: dict[str, float] = {}
        self.lock = threading.RLock()
        self._pending: dict[str, SiteRequest] = {}  # by the id of the task
        self._unanswered: dict[str, SiteRequest] = {}  # given up by the server
        self._phases: dict[str, PhaseParticipation] = {}
        self._away: set[str] = set()  # sites that NVFlare reports as disconnected
        self._worked: list[tuple[float, float]] = []
        self._began = 0.0
        self._aggregation_began: float | None = None
        self.guarded = monitor.host.guarded
        self._aggregation = contextlib.ExitStack()  # the aggregation in progress
        self._ended_by_server = False  # whether the end of the job by failure or abortion was reported
        self._measuring = BackgroundWork("fedvitals-updates")
        self._room_to_wait = threading.BoundedSemaphore(MOST_WAITING)
        self._spare = ReusableVectors()
        monitor.host.awaits(lambda: participation.awaited([*self._pending.values()]))

    # -- rounds -------------------------------------------------------------------------------------------------------

    def announce(self, round_index: int, model: models.Arrays | None) -> None:
        """Begin a round, at once if its model is known, else when it is sent to the first site."""
        with self.lock:
            if round_index in (self.round_index, self._announced):
                return
            self.end()
            known = self._newest if model is None or model.is_difference else model.values
            if known:
                self.begin(round_index, known)
            else:
                self._announced = round_index

    def begin(self, round_index: int, start: dict[str, Values] | None) -> None:
        """Begin a round and end the previous one, unless the round is already open."""
        with self.lock:
            if self.round_index == round_index:
                return
            if self._announced == round_index:
                self._announced = None
            self.end()
            prescribed = self.monitor.host.prescribed
            self.guarded("prescribing", lambda: self.corrections.follow(prescribed(round_index), round_index, None))
            self.round_index = self._last = round_index
            self.start, self._newest = start, None
            self._began = time.time()
            outline = None if start is None else self.guarded("reading a model", lambda: self._outline_of(start))
            # In a context of its own: NVFlare's threads come and go, and none may stay inside this round.
            contextvars.copy_context().run(self.monitor.host.round_begin, round_index, outline)

    def _outline_of(self, values: dict[str, Values]) -> Any:
        if self._outline is None or not self._outline.fits(values) or isinstance(self._outline, ArrayOutline):
            self._outline = new_outline(values)
        else:
            self._outline.load(values)
        return self._outline

    def end(self, model: models.Arrays | None = None) -> None:
        """End the open round; `model`: its last model, if known."""
        with self.lock:
            if self.round_index is None and self._announced is not None:
                self.begin(self._announced, self._newest)  # nobody fetched its model
            if self.round_index is None:
                return
            self._aggregation.close()  # if its end was not reported
            self._measuring.wait()
            self._report_phases()
            whole = max(time.time() - self._began, 1e-9)
            self.monitor.host.log({"time.worked": min(1.0, covered(self._worked) / whole)})
            after = self._newest if model is None or model.is_difference else model.values
            outline = None if after is None else self.guarded("reading a model", lambda: self._outline_of(after))
            contextvars.copy_context().run(self.monitor.host.round_end, self.round_index, outline, self._metrics)
            self.round_index, self._newest = None, after
            self._worked, self._metrics = [], {}

    def close(self) -> None:
        """End the open round and the run, and report what happened after the last round.

        A forked process leaves that to its parent.
        """
        # Before any lock, which a thread of the parent may have held.
        if self.monitor.host.monitored.lifecycle.is_of_parent:
            return
        self.end()
        with self.lock:
            self._report_phases()
        self.monitor.close()

    def failed(self, reason: str) -> None:
        """Report that NVFlare's server gave up on the job."""
        self._ended_by_server = True
        data = {"exception": "FATAL_SYSTEM_ERROR"}
        self.monitor.host.event("error", "round.failed", reason[:1000], data=data)

    def aborted(self) -> None:
        """Report that the job was ended while a round was open; clients without an answer by then are not late."""
        with self.lock:
            pending, self._pending = self._pending, {}
            if self.round_index is None or self._ended_by_server:
                return
            self._ended_by_server = True
            working = sorted({request.node for request in pending.values() if request.fetched and not request.failed})
            others = f" Still at work: {', '.join(working)}." if working else ""
            text = f"The job was ended from outside of its workflow, in round {self.round_index}.{others}"
            self.monitor.host.event("error", "round.failed", text, data={"exception": "JOB_ABORTED"})
            # In our own words, so released at any level.
            self.monitor.host.event("error", "job.aborted", text, data={"working": working})

    def aggregating(self) -> None:
        """Note that the server begins to aggregate."""
        self._aggregation_began = time.time()
        self._aggregation.enter_context(self.monitor.host.part("aggregate"))

    def aggregated(self, model: models.Arrays | None, metrics: Mapping[str, Any], contributions: int | None) -> None:
        """Record the result of an aggregation: the new model or the change to it, and averaged metrics."""
        with self.lock:
            now = time.time()
            if self._aggregation_began is not None:
                self._worked.append((self._aggregation_began, now))
                self._aggregation.close()
                self._aggregation_began = None
            if contributions == 0 or model is None or not (model.values or model.unread):
                answered = len(self._phases.get(TRAIN, PhaseParticipation()).answered)
                text = f"The server made no model of {answered} answers."
                self.monitor.host.event("error", "aggregation.failed", text, data={"answered": answered})
            elif not model.is_difference:
                self._newest = model.values
            elif self.start is not None:
                self._newest = models.added(self.start, model.values)
            numbers = {str(name): float(value) for name, value in metrics.items() if isinstance(value, int | float)}
            self._metrics.update(with_known_names(numbers))

    # -- tasks --------------------------------------------------------------------------------------------------------

    def task_fetched(self, task_id: str, request: SiteRequest, round_index: int | None, targets: Sequence[str]) -> None:
        """Record that a site was sent a task, which begins a round if it belongs to a new one.

        `targets`: all sites that the same task is for; those that never fetch it count as late.
        """
        with self.lock:
            phase, node = request.phase, request.node
            if phase == TRAIN:
                self._begin_with(request, round_index)
            request.round_index = self.round_index or 0
            participants = self._phases.setdefault(phase, PhaseParticipation())
            for target in targets:
                if target not in participants.asked:
                    participants.asked[target] = None
                    waiting = SiteRequest(target, phase, request.round_index, request.sent, 0, fetched=False)
                    self._pending[f"{phase}/{target}"] = waiting
            self._pending.pop(f"{phase}/{node}", None)
            participants.asked[node] = None
            self._pending[task_id] = request
            if self._is_busy(node):
                participants.busy[node] = None
                text = f"{node} is asked to {phase}, and still owes an answer."
                self.monitor.host.event("info", "client.busy", text, node=node, data={"phase": phase})
            kind = "model" if phase == TRAIN else phase
            self.monitor.host.transfer("server", node, request.size, kind=kind)

    def _begin_with(self, request: SiteRequest, round_index: int | None) -> None:
        if round_index is None:  # the workflow does not count: a new round begins when a site is asked again
            training = self._phases.get(TRAIN, PhaseParticipation())
            again = self.round_index is None or request.node in training.answered or request.node in training.failed
            round_index = self._last + 1 if again else self.round_index
        if round_index is None or round_index == self.round_index:
            return
        sent = models.arrays_of(request.data)
        self.begin(round_index, None if sent is None or sent.is_difference else sent.values)

    def _is_busy(self, node: str) -> bool:
        return any(owing.node == node for owing in self._unanswered.values())

    def result_arrived(self, task_id: str) -> None:
        """Record when the result of a task came in, before the server's filters see it."""
        with self.lock:
            request = self._pending.get(task_id)
            if request is not None:
                request.returned = time.time()

    def take_request(self, task_id: str, node: str) -> SiteRequest | None:
        """Return the task that a site's result answers; None if it was not asked, or was given up."""
        with self.lock:
            request = self._pending.get(task_id)
            if request is None or request.node != node:
                self._answered_late(task_id, node)
                return None
            self._pending.pop(task_id)
            for key in [key for key, owing in self._unanswered.items() if owing.node == node]:
                self._unanswered.pop(key)
            return request

    def request_of(self, task_id: str) -> SiteRequest | None:
        """Return the task of this id, answered or not; None if there was none."""
        with self.lock:
            return self._pending.get(task_id) or self._unanswered.get(task_id)

    def _answered_late(self, task_id: str, node: str) -> None:
        request = self._unanswered.get(task_id)
        if request is None or request.node != node:
            return
        self._unanswered.pop(task_id)
        waited = time.time() - request.sent
        answer = f"The answer of {node} to round {request.round_index}"
        text = f"{answer} came after {waited:.1f} s, when nobody waited any more."
        data = {"phase": request.phase, "waited": waited, "round": request.round_index}
        self.monitor.host.event("info", "client.answered_late", text, node=node, data=data)

    def answered(self, request: SiteRequest, *, failed: bool) -> None:
        """Record that a site answered, or failed."""
        participants = self._phases.setdefault(request.phase, PhaseParticipation())
        (participants.failed if failed else participants.answered)[request.node] = None

    def worked(self, began: float, ended: float) -> None:
        """Record an interval of work."""
        self._worked.append((began, ended))

    def _report_phases(self) -> None:
        """Report each phase's participation; sites without an answer by the round's end count as late, or as gone."""
        phases, self._phases = self._phases, {}
        for name, phase in phases.items():
            for key, request in [*self._pending.items()]:
                if request.phase == name and request.node in phase.asked:
                    self._pending.pop(key)
                    self._late(key, request, phase)
            participation.report(self.monitor.host, name, phase)

    def _late(self, task_id: str, request: SiteRequest, phase: PhaseParticipation) -> None:
        node, waited = request.node, time.time() - request.sent
        data = {"phase": request.phase, "waited": waited, "round": request.round_index}
        if node in self._away:
            phase.failed[node] = None
            text = f"{node} was asked to {request.phase}, and is not connected."
            gone = {**data, "exception": "CLIENT_DISCONNECTED", "code": "CLIENT_DISCONNECTED"}
            self.monitor.host.event("warning", "client.dropped_out", text, node=node, data=gone)
            return
        if request.failed:  # reported by the site's own message
            return
        phase.late[node] = None
        if request.fetched:
            self._unanswered[task_id] = request
            request.data = None
            while len(self._unanswered) > UNANSWERED_KEPT:
                self._unanswered.pop(next(iter(self._unanswered)))
        asked = f"was asked to {request.phase}" if request.fetched else f"did not come for its task to {request.phase}"
        text = f"{node} {asked} and did not answer within {waited:.1f} s."
        self.monitor.host.event("warning", "update.late", text, node=node, data=data)

    # -- connections --------------------------------------------------------------------------------------------------

    def disconnected(self, node: str) -> None:
        """Report that NVFlare considers a site disconnected."""
        with self.lock:
            if node not in self._away:
                self._away.add(node)
                text = f"{node} is no longer connected."
                self.monitor.host.event("warning", "client.disconnected", text, node=node)

    def reconnected(self, node: str) -> None:
        """Report that a site is back."""
        with self.lock:
            if node in self._away:
                self._away.discard(node)
                self.monitor.host.event("info", "client.connected", f"{node} is connected again.", node=node)

    # -- updates ------------------------------------------------------------------------------------------------------

    def measure_update(
        self, request: SiteRequest, start: Mapping[str, Values], end: Mapping[str, Values]
    ) -> Sequence[Action]:
        """Measure a site's update on a thread of our own, before the round's end; nothing waits for it.

        If a correction may follow at once, or too many updates are waiting, it is measured here.
        """
        host, round_index, node = self.monitor.host, request.round_index, request.node
        clients = len(self._phases.get(TRAIN, PhaseParticipation()).asked)

        what = (host, round_index, node, start, end, clients, self._spare)
        measure = functools.partial(array_models.measure_update, *what)

        def measure_later() -> None:
            try:
                self.guarded("measuring an update", measure, node)
            finally:
                self._room_to_wait.release()

        if host.corrects_at_once or not self._room_to_wait.acquire(blocking=False):
            return self.guarded("measuring an update", measure, node) or ()
        self._measuring.submit(measure_later)
        return ()


def _obstacle(action: Action) -> str | None:
    """Return why an action cannot be applied to an NVFlare job."""
    return None if action.kind == "quarantine" else f"'{action.kind}' is not applied to NVFlare jobs; quarantine is."
