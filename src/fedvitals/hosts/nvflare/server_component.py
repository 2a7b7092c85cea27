# SPDX-License-Identifier: Apache-2.0
"""The server's side: a component of the job that watches NVFlare's events.

It is a filter for a task that never occurs, because that is NVFlare's way to add a component to a recipe: its `process`
never runs, and it gets all events. Its arguments are plain data, since a job is sent as JSON.
"""

from __future__ import annotations

import functools
import logging
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType

from fedvitals.diagnosis.gaps import NOTHING_SEEN, UNSEEN
from fedvitals.errors import RecordError
from fedvitals.hosts import client_telemetry
from fedvitals.hosts.nvflare import filters, models, task_results
from fedvitals.hosts.nvflare.envelope import KEY, read_envelope, run_name, trace_id
from fedvitals.hosts.nvflare.server_rounds import EVALUATE, EVALUATION_TASKS, TRAIN, ServerRounds, SiteRequest
from fedvitals.monitor.lifecycle import close_at_exit
from fedvitals.monitor.monitor import Monitor

logger = logging.getLogger("fedvitals")
SIMULATED = "simulate_job"  # the id of every job in the simulator
TOPIC = "fedvitals.failure"  # of messages in which a site reports why a task failed, if its result cannot
PEER_CONTROLLER = "ServerSideController"  # of swarm learning, and of all workflows that sites run among themselves
HIGHEST_LEVEL = 4  # of the privacy levels


class ServerWatch(Filter):  # type: ignore[misc] # NVFlare has no types
    """Watches the server of a job. All arguments are those of `fv.nvflare.attach`.

    `filters`: class names of the job's filters on what sites send.
    """

    def __init__(
        self,
        store: str = "runs.db",
        run: str = "nvflare",
        probes: str = "standard",
        privacy: int | None = None,
        tracebacks: bool | None = None,
        guard: str = "report",
        cure: str | None = None,
        filters: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.store, self.run, self.probes, self.privacy = store, run, probes, privacy
        self.tracebacks, self.guard, self.cure, self.filters = tracebacks, guard, cure, filters
        self._rounds: ServerRounds | None = None
        self._failed = False  # whether watching could not begin
        self._stated: set[str] = set()
        self._histories: dict[str, list[str]] = {}  # the newest filter history of each site
        handlers: dict[str, Callable[[ServerRounds, FLContext], None]] = {
            AppEventType.ROUND_STARTED: _round_started,
            EventType.AFTER_TASK_DATA_FILTER: _task_fetched,
            EventType.BEFORE_TASK_RESULT_FILTER: self._result_arrived,
            EventType.BEFORE_PROCESS_SUBMISSION: self._result_read,
            AppEventType.BEFORE_AGGREGATION: lambda rounds, _: rounds.aggregating(),
            AppEventType.AFTER_AGGREGATION: _aggregated,
            AppEventType.ROUND_DONE: _round_done,
            EventType.CLIENT_DISCONNECTED: _disconnected,
            EventType.CLIENT_RECONNECTED: _reconnected,
            EventType.FATAL_SYSTEM_ERROR: _fatal,
            EventType.END_WORKFLOW: _workflow_ended,
        }
        self._handlers = handlers

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the message unchanged; never called, because no task has our name."""
        del fl_ctx
        return shareable

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Handle an NVFlare event. Our failures are reported and must not affect the job."""
        try:
            if event_type == EventType.START_RUN:
                self._begin(fl_ctx)
            rounds = self._rounds
            if rounds is None:
                return
            handler = self._handlers.get(event_type)
            if handler is not None:
                rounds.guarded(f"reading the event {event_type}", functools.partial(handler, rounds, fl_ctx))
            elif event_type == EventType.END_RUN:
                self._rounds = None
                rounds.close()
        except Exception as error:  # noqa: BLE001 - the job goes on, whatever happens to us
            if not self._failed:
                self._failed = True
                words = "fedvitals does not watch this job (%s: %s); it runs as usual."
                logger.warning(words, type(error).__name__, error)

    def _begin(self, fl_ctx: FLContext) -> None:
        """Create the monitor when the job starts."""
        if self._rounds is not None or self._failed:
            return
        job_id = str(fl_ctx.get_job_id() or SIMULATED)
        more: dict[str, Any] = {} if self.cure is None else {"cure": self.cure}
        monitor = Monitor(
            self.store,
            run=self.run,
            id=None if job_id == SIMULATED else run_name(job_id),
            probes=self.probes,
            privacy=self.privacy,
            tracebacks=self.tracebacks,
            **more,
        )
        names = self.filters or []
        encrypts = bool(filters.encrypting(names))
        config = {
            "job": job_id,
            "workflows": [type(controller).__name__ for controller in _controllers(fl_ctx)],
            "filters": names,
        }
        most = filters.LEVEL if encrypts else HIGHEST_LEVEL
        monitor.host.describe("nvflare", {"nvflare": config}, trace=trace_id(job_id), most=most)
        self._rounds = ServerRounds(monitor, job_id, guard_mode=self.guard, hides=encrypts)
        monitor.host.before_close(self._rounds.end)
        close_at_exit(self._rounds)
        self._state(self._rounds, names, "the job's filters")
        if _is_left_to_sites(fl_ctx):
            monitor.host.event(
                "warning", UNSEEN, f"{NOTHING_SEEN.capitalize()}.", data={"workflows": config["workflows"]}
            )
        engine = fl_ctx.get_engine()
        engine.register_aux_message_handler(topic=TOPIC, message_handle_func=self._failure_arrived)
        asking = "" if monitor.file is None else f" --store {shlex.quote(str(monitor.file))}"
        logger.info("fedvitals watches: fedvitals show %s%s", monitor.run.id, asking)

    def _state(self, rounds: ServerRounds, names: list[str], source: str) -> None:
        """State that updates are changed on their way, once for each set of filters."""
        data = filters.statement(names)
        words = data.get("stated", "")
        if words and words not in self._stated:
            self._stated.add(words)
            text = f"Updates are changed on their way, by {source}: {words}."
            rounds.monitor.host.event("info", "updates.transformed", text, data=data)

    # -- results ------------------------------------------------------------------------------------------------------

    def _result_arrived(self, rounds: ServerRounds, fl_ctx: FLContext) -> None:
        """Record when a result arrived, since the server's filters may take time."""
        task_id = fl_ctx.get_prop(FLContextKey.TASK_ID)
        if isinstance(task_id, str) and isinstance(fl_ctx.get_prop(FLContextKey.TASK_RESULT), Shareable):
            rounds.result_arrived(task_id)

    def _result_read(self, rounds: ServerRounds, fl_ctx: FLContext) -> None:
        """Read a result as the workflow will get it, and remove our telemetry from it."""
        result, task_id = fl_ctx.get_prop(FLContextKey.TASK_RESULT), fl_ctx.get_prop(FLContextKey.TASK_ID)
        if not isinstance(result, Shareable) or not isinstance(task_id, str):
            return
        header = _without_header(result)
        node = _authenticated_name(result)
        request = None if node is None else rounds.take_request(task_id, node)
        if request is None or node is None:
            return
        with rounds.lock:
            panic = task_results.read_result(rounds, request, result, header)
        if panic is not None:
            self.system_panic(panic, fl_ctx)
        self._note_history(rounds, node, result)

    def _note_history(self, rounds: ServerRounds, node: str, result: Shareable) -> None:
        """State that updates are filtered if most sites' results say so."""
        dxo = models.dxo_of(result)
        if dxo is None:
            return
        self._histories[node] = filters.history_of(dxo.meta)
        counts: dict[str, int] = {}
        for names in self._histories.values():
            for name in dict.fromkeys(names):
                counts[name] = counts.get(name, 0) + 1
        most = [name for name, count in counts.items() if count >= max(2, len(self._histories) // 2 + 1)]
        self._state(rounds, most, "filters that most sites' results name")

    def _failure_arrived(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Handle a site's message of why a task failed.

        The task's id, known only to the site, identifies the sender.
        """
        del topic, fl_ctx
        rounds, task_id, header = self._rounds, request.get("task_id"), request.get(KEY)
        if rounds is not None and isinstance(task_id, str):
            rounds.guarded("reading a failure", functools.partial(_failure_read, rounds, task_id, header))
        return make_reply("OK")


def _without_header(result: Shareable) -> Any:
    """Remove our header from a result, and return it; None if there is none."""
    headers = result.get("__headers__")
    return headers.pop(KEY, None) if isinstance(headers, dict) else None


def _authenticated_name(result: Shareable) -> str | None:
    """Return the name of the site that sent a result, as NVFlare's server knows it by its token."""
    name = getattr(result.get_header(ServerCommandKey.FL_CLIENT), "name", None)
    return name if isinstance(name, str) else None


def _controllers(fl_ctx: FLContext) -> list[Any]:
    config = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "config", None)
    return [workflow.controller for workflow in getattr(config, "workflows", ())]


def _is_left_to_sites(fl_ctx: FLContext) -> bool:
    kinds = (kind.__name__ for controller in _controllers(fl_ctx) for kind in type(controller).__mro__)
    return PEER_CONTROLLER in kinds


def _failure_read(rounds: ServerRounds, task_id: str, header: Any) -> None:
    with rounds.lock:
        request = rounds.request_of(task_id)
        if request is None:
            return
        try:
            failure = read_envelope(header, 1e9).failure
        except RecordError as error:
            client_telemetry.report_impossible(rounds.monitor.host, request.node, request.phase, error)
            return
        if failure is not None:
            task_results.read_failure(rounds, request, failure)


# -- events ---------------------------------------------------------------------------------------------------------


def _round_started(rounds: ServerRounds, fl_ctx: FLContext) -> None:
    round_index = fl_ctx.get_prop(AppConstants.CURRENT_ROUND)
    if isinstance(round_index, int):
        rounds.announce(round_index, models.arrays_of_model(fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)))


def _task_fetched(rounds: ServerRounds, fl_ctx: FLContext) -> None:
    data, task_id = fl_ctx.get_prop(FLContextKey.TASK_DATA), fl_ctx.get_prop(FLContextKey.TASK_ID)
    task_name = str(fl_ctx.get_prop(FLContextKey.TASK_NAME) or "")
    client_task = _client_task(fl_ctx, task_id)
    if not isinstance(data, Shareable) or not isinstance(task_id, str) or client_task is None:
        return
    round_index = data.get_header(AppConstants.CURRENT_ROUND)
    request = SiteRequest(client_task.client.name, _phase(task_name, data), 0, time.time(), models.bytes_of(data), data)
    counted = round_index if isinstance(round_index, int) and round_index >= 0 else None
    rounds.task_fetched(task_id, request, counted, _targets(client_task))


def _client_task(fl_ctx: FLContext, task_id: Any) -> Any:
    """Return NVFlare's own record of a task; None if there is none."""
    workflow = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "current_wf", None)
    communicator = getattr(getattr(workflow, "controller", None), "communicator", None)
    return None if communicator is None else communicator.process_task_check(task_id, fl_ctx)


def _targets(client_task: Any) -> list[str]:
    """Return all sites that are asked the same at the same time; empty if they are asked one after the other."""
    operator = client_task.task.operator
    if not isinstance(operator, Mapping) or operator.get("method") != "bcast":
        return []
    return [target for target in client_task.task.targets or () if isinstance(target, str)]


def _phase(task_name: str, data: Shareable) -> str:
    if task_name in EVALUATION_TASKS:
        return EVALUATE
    return TRAIN if task_name == TRAIN or models.arrays_of(data) is not None else task_name


def _aggregated(rounds: ServerRounds, fl_ctx: FLContext) -> None:
    result = fl_ctx.get_prop(AppConstants.AGGREGATION_RESULT)
    metrics = result.metrics if isinstance(result, FLModel) else None
    meta = result.meta if isinstance(result, FLModel) else None
    count = meta.get("nr_aggregated") if isinstance(meta, Mapping) else None
    rounds.aggregated(models.arrays_of_model(result), metrics if isinstance(metrics, Mapping) else {}, count)


def _round_done(rounds: ServerRounds, fl_ctx: FLContext) -> None:
    rounds.end(models.arrays_of_model(fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)))


def _disconnected(rounds: ServerRounds, fl_ctx: FLContext) -> None:
    rounds.disconnected(str(fl_ctx.get_prop(FLContextKey.DISCONNECTED_CLIENT_NAME)))


def _reconnected(rounds: ServerRounds, fl_ctx: FLContext) -> None:
    rounds.reconnected(str(fl_ctx.get_prop(FLContextKey.RECONNECTED_CLIENT_NAME)))


def _workflow_ended(rounds: ServerRounds, fl_ctx: FLContext) -> None:
    signal = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "abort_signal", None)
    if getattr(signal, "triggered", False):
        rounds.aborted()
    rounds.end()


def _fatal(rounds: ServerRounds, fl_ctx: FLContext) -> None:
    rounds.failed(str(fl_ctx.get_prop(FLContextKey.EVENT_DATA) or "NVFlare's server ended the job."))
