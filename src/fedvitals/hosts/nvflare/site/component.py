# SPDX-License-Identifier: Apache-2.0
"""A site's side: a component of the job that measures tasks, and sends the numbers along with their results.

Like the server's it is a filter for a task that never occurs, in order to receive NVFlare's events. It changes no task,
no result and no weight, and adds one header to each result. The header is set before the site's own filters run, so
that they see everything that leaves. An error on our side only costs telemetry.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants

from fedvitals.errors import RecordError
from fedvitals.hosts.nvflare import filters, models
from fedvitals.hosts.nvflare.envelope import KEY, ResultEnvelope, SiteFailure, read_envelope
from fedvitals.hosts.nvflare.server_rounds import EVALUATION_TASKS, TRAIN
from fedvitals.hosts.nvflare.site.failures import (
    FailureFileWatch,
    LoggedExceptions,
    failure_of,
    take_written_failure,
)
from fedvitals.hosts.nvflare.site.settings import SiteSettings
from fedvitals.hosts.nvflare.site.task import SiteTask
from fedvitals.hosts.startup_path import SITE_FOLDER
from fedvitals.resources.process_start import process_started
from fedvitals.transport.privacy import WORDS

logger = logging.getLogger("fedvitals")
TOPIC = "fedvitals.failure"  # of messages that report why a task failed, if its result cannot
PEER_CONTROLLER = "ClientSideController"  # of swarm learning, and of all workflows that sites run among themselves
CLIENT_API = "ClientAPIExecutor"  # its scripts begin and end their tasks by the Client API


@dataclass(slots=True)
class OpenTask:
    """A task that the site is working on."""

    task_id: str
    received: float
    cpu: float
    size: int
    watched: SiteTask | None = None  # if the executor trains on this thread
    answered: bool = False  # whether its result has our header
    failures: FailureFileWatch | None = None  # if a script in its own process may fail
    failure: SiteFailure | None = None  # reported by that script

    def close(self) -> None:
        """Close everything that is open."""
        if self.failures is not None:
            self.failures.stop()
        if self.watched is not None:
            self.watched.close()


class SiteWatch(Filter):  # type: ignore[misc] # NVFlare has no types
    """Watches a site of a job. All arguments are those of `fv.nvflare.attach`."""

    def __init__(
        self, probes: str = "standard", privacy: int | None = None, tracebacks: bool = False, trainers: bool = True
    ) -> None:
        super().__init__()
        self.probes, self.privacy, self.tracebacks, self.trainers = probes, privacy, tracebacks, trainers
        self._settings: SiteSettings | None = None  # set once the job has started
        self._task: OpenTask | None = None
        self._exceptions = LoggedExceptions()
        self._failure_file: Path | None = None
        self._reported: set[str] = set()
        self._handlers = {
            EventType.ABOUT_TO_START_RUN: self._begin,
            EventType.BEFORE_TASK_EXECUTION: self._task_begins,
            EventType.AFTER_TASK_EXECUTION: self._task_ends,
            EventType.BEFORE_SEND_TASK_RESULT: self._before_sending,
            EventType.END_RUN: self._end,
        }

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the message unchanged; never called, because no task has our name."""
        del fl_ctx
        return shareable

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Handle an NVFlare event. Our failures are logged once and must not affect the job."""
        handler = self._handlers.get(event_type)
        if handler is None:
            return
        try:
            handler(fl_ctx)
        except Exception as error:  # noqa: BLE001 - the site trains on, whatever happens to us
            cause = f"{event_type}: {type(error).__name__}: {error}"
            if cause not in self._reported and len(self._reported) < 100:
                self._reported.add(cause)
                logger.warning("fedvitals could not finish %s; training goes on.", cause)

    # -- the job ------------------------------------------------------------------------------------------------------

    def _begin(self, fl_ctx: FLContext) -> None:
        settings = SiteSettings.of_job(os.environ, self.probes, self.privacy, tracebacks=self.tracebacks)
        hiding = _hiding_filters(fl_ctx)
        if hiding and settings.level > filters.LEVEL:
            words = "fedvitals: with %s among the filters nobody may learn of a single site; privacy level %d holds."
            logger.warning(words, ", ".join(hiding), filters.LEVEL)
            settings = settings.limited_to(filters.LEVEL)
        self._settings = settings
        self._exceptions.install()
        if _sites_train_each_other(fl_ctx):
            return  # a script's result goes to another site, which must not see its numbers
        self._watch_client_api(settings)
        if self.trainers:
            root = Path(
                str(fl_ctx.get_prop(FLContextKey.APP_ROOT) or fl_ctx.get_prop(FLContextKey.WORKSPACE_ROOT) or ".")
            )
            self._failure_file = root.absolute() / f"fedvitals-failure-{os.getpid()}.json"
            os.environ.update(settings.variables(os.environ, str(self._failure_file)))
            if str(SITE_FOLDER) not in sys.path:  # used by NVFlare for the PYTHONPATH of its child processes
                sys.path.insert(0, str(SITE_FOLDER))

    def _watch_client_api(self, settings: SiteSettings) -> None:
        from nvflare.client.in_process.api import InProcessClientAPI  # noqa: PLC0415 - sites need it, servers do not

        from fedvitals.hosts.nvflare.site.trainer import watch_client_api  # noqa: PLC0415 - as above

        watch_client_api(InProcessClientAPI, settings)

    def _end(self, fl_ctx: FLContext) -> None:
        del fl_ctx
        self._exceptions.remove()
        if str(SITE_FOLDER) in sys.path:
            sys.path.remove(str(SITE_FOLDER))
        if self._task is not None:
            self._task.close()
        self._task = None

    # -- tasks --------------------------------------------------------------------------------------------------------

    def _task_begins(self, fl_ctx: FLContext) -> None:
        if self._settings is None:
            return
        data = fl_ctx.get_prop(FLContextKey.TASK_DATA)
        task_id, name = str(fl_ctx.get_prop(FLContextKey.TASK_ID)), str(fl_ctx.get_prop(FLContextKey.TASK_NAME))
        self._exceptions.forget()
        self._task = OpenTask(task_id, time.time(), time.process_time(), models.bytes_of(data))
        if _trains_here(fl_ctx, name, data):
            self._task.watched = self._watch(fl_ctx, self._settings, data)
        elif self._failure_file is not None:
            report = functools.partial(self._script_failed, self._task, fl_ctx.get_engine())
            self._task.failures = FailureFileWatch(self._failure_file, report)

    def _watch(self, fl_ctx: FLContext, settings: SiteSettings, data: Shareable) -> SiteTask:
        """Open the scope of a task that an executor works on, on this thread."""
        round_index = data.get_header(AppConstants.CURRENT_ROUND)
        arrays = models.arrays_of(data) if settings.level >= WORDS else None
        start = None if arrays is None or arrays.is_difference else arrays.values
        job, site = str(fl_ctx.get_job_id()), str(fl_ctx.get_identity_name())
        return SiteTask(settings, job, site, round_index if isinstance(round_index, int) else None, start)

    def _task_ends(self, fl_ctx: FLContext) -> None:
        task, result = self._task, fl_ctx.get_prop(FLContextKey.TASK_RESULT)
        if task is None or self._settings is None or not isinstance(result, Shareable):
            return
        if task.failures is not None:
            task.failures.stop()
        envelope = self._envelope(task, result)
        if result.get_return_code() != ReturnCode.OK:
            envelope = replace(envelope, failure=self._failure(task))
        result.set_header(KEY, envelope.header())
        task.answered = True

    def _envelope(self, task: OpenTask, result: Shareable) -> ResultEnvelope:
        """Return the telemetry of a task: from its script if that has sent any, else from this thread."""
        of_script = _taken_from_script(result)
        if task.watched is not None:
            arrays = models.arrays_of(result)
            sent = None if arrays is None or arrays.is_difference else arrays.values
            of_script = task.watched.finish(sent, message_bytes=max(task.size, models.bytes_of(result)))
            task.watched = None
        now = time.time()
        if of_script is not None:  # the task's way between the site and its script counts as the site's time
            return replace(of_script, received=task.received, replied=now)
        cpu = time.process_time() - task.cpu
        return ResultEnvelope(b"", task.received, now, process_started() or task.received, cpu)

    def _failure(self, task: OpenTask) -> SiteFailure | None:
        """Return why the task failed, as far as the site releases it."""
        error = self._exceptions.first
        written = None if self._failure_file is None else take_written_failure(self._failure_file)
        return self._released(failure_of(error) if error is not None else written or task.failure)

    def _released(self, failure: SiteFailure | None) -> SiteFailure | None:
        settings = self._settings
        if failure is None or settings is None:
            return None
        if settings.tracebacks and settings.level >= WORDS:
            return failure
        return SiteFailure(failure.exception)

    def _before_sending(self, fl_ctx: FLContext) -> None:
        """Tell the server why a task failed if its executor raised, as NVFlare creates that result after all events."""
        task, self._task = self._task, None
        if task is None or task.answered or self._settings is None:
            return
        task.close()
        failure = self._failure(task)
        if failure is not None:
            _tell_failure(fl_ctx.get_engine(), fl_ctx, task, failure)

    def _script_failed(self, task: OpenTask, engine: Any, failure: SiteFailure) -> None:
        """Tell the server at once that a script failed while NVFlare still considers its process alive."""
        task.failure = failure
        released = self._released(failure)
        if released is None:
            return
        try:
            with engine.new_context() as fl_ctx:
                _tell_failure(engine, fl_ctx, task, released)
        except Exception as error:  # noqa: BLE001 - the site trains on, whatever happens to us
            logger.warning("fedvitals could not report a failure to the server: %s", error)


def _tell_failure(engine: Any, fl_ctx: FLContext, task: OpenTask, failure: SiteFailure) -> None:
    """Send the server a message of why a task failed, without waiting for it."""
    now = time.time()
    envelope = ResultEnvelope(b"", task.received, now, now, time.process_time() - task.cpu, failure)
    message = Shareable({"task_id": task.task_id, KEY: envelope.header()})
    engine.fire_and_forget_aux_request(topic=TOPIC, request=message, fl_ctx=fl_ctx, optional=True)


def _trains_here(fl_ctx: FLContext, task_name: str, data: Any) -> bool:
    """Return whether a task is a training task of an executor that works on this thread."""
    if task_name in EVALUATION_TASKS or not isinstance(data, Shareable):
        return False
    if task_name != TRAIN and models.arrays_of(data) is None:
        return False
    runner = fl_ctx.get_prop(FLContextKey.RUNNER)
    executor = None if runner is None else runner.find_executor(task_name)
    return executor is not None and all(kind.__name__ != CLIENT_API for kind in type(executor).__mro__)


def _sites_train_each_other(fl_ctx: FLContext) -> bool:
    """Return whether sites send their results to one another, as in swarm learning."""
    router = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "task_router", None)
    executors = getattr(router, "task_table", {}).values()
    return any(kind.__name__ == PEER_CONTROLLER for executor in executors for kind in type(executor).__mro__)


def _hiding_filters(fl_ctx: FLContext) -> list[str]:
    """Return the filters that hide what telemetry would reveal: known ones of the job, and all of the site's own."""
    of_job = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "task_result_filters", None) or {}
    names = [
        name
        for place, entries in of_job.items()
        if str(place).endswith(FilterKey.OUT)
        for name in filters.names_of(entries)
    ]
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)
    own = (getattr(scope, "task_result_filters", None) or {}).get(FilterKey.OUT, [])
    return [*dict.fromkeys((*filters.hiding(names), *filters.names_of(own)))]


def _taken_from_script(result: Shareable) -> ResultEnvelope | None:
    """Remove the telemetry of a training script from its result's meta, and return it."""
    dxo = models.dxo_of(result)
    header = None if dxo is None else dxo.meta.pop(KEY, None)
    if header is None:
        return None
    try:
        return read_envelope(header, 1e9)
    except RecordError as error:
        logger.warning("fedvitals does not understand what the training script reports: %s", error)
        return None
