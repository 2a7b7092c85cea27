# SPDX-License-Identifier: Apache-2.0
"""The server's component on NVFlare's events: whose a result is, what is left in it, and what filters mean."""

from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'fedvitals[nvflare]'")

from nvflare.apis.client import Client
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType

from fedvitals.cli.main import main
from fedvitals.hosts.nvflare import server_component
from fedvitals.hosts.nvflare.envelope import KEY, ResultEnvelope, SiteFailure
from fedvitals.hosts.nvflare.server_component import ServerWatch
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from support.nvflare_rounds import JOB, changed, failed, message, model, result

SITES = ("site-1", "site-2", "site-3")


class Job:
    """A job whose events are fired by hand, as NVFlare's server does; `tasks` is its note of who has which task."""

    def __init__(self, tmp_path, controllers=(), **settings):
        self.store = tmp_path / "runs.db"
        self.watch = ServerWatch(str(self.store), "digits", **settings)
        self.handlers, self.tasks = {}, {}
        communicator = SimpleNamespace(process_task_check=lambda task_id, _: self.tasks.get(task_id))
        workflow = SimpleNamespace(controller=SimpleNamespace(communicator=communicator))
        workflows = [SimpleNamespace(controller=controller) for controller in controllers]
        self.runner = SimpleNamespace(current_wf=workflow, config=SimpleNamespace(workflows=workflows))
        self.fire(EventType.START_RUN)

    def register_aux_message_handler(self, topic, message_handle_func):
        self.handlers[topic] = message_handle_func

    def fire(self, event, peer=None, **props):
        context = FLContext()
        context.get_engine, context.get_job_id = lambda: self, lambda: JOB
        context.set_prop(FLContextKey.RUNNER, self.runner, private=True)
        for name, value in props.items():
            context.set_prop(getattr(FLContextKey, name, name), value, private=True)
        if peer is not None:
            claims = FLContext()
            claims.set_prop(ReservedKey.IDENTITY_NAME, peer, private=False)
            context.set_peer_context(claims)
        self.watch.handle_event(event, context)

    def ask(self, site, round_index=0, peer=None):
        task_id = f"{site}-{round_index}"
        task = SimpleNamespace(operator={"method": "bcast"}, targets=[*SITES])
        self.tasks[task_id] = SimpleNamespace(client=Client(site, "token"), task=task)
        data = message(model(), round_index=round_index)
        self.fire(EventType.AFTER_TASK_DATA_FILTER, peer or site, TASK_DATA=data, TASK_ID=task_id, TASK_NAME="train")
        return task_id

    def answer(self, site, task_id, reply, peer=None):
        reply.set_header(ServerCommandKey.FL_CLIENT, Client(site, "token"))
        for event in (EventType.BEFORE_TASK_RESULT_FILTER, EventType.BEFORE_PROCESS_SUBMISSION):
            self.fire(event, peer or site, TASK_RESULT=reply, TASK_ID=task_id, TASK_NAME="train")

    def events(self, name):
        self.fire(EventType.END_RUN)
        with open_reader(self.store) as reader:
            (run,) = queries.list_runs(reader)
            return [*queries.events(reader, run.id, name=name)]

    def latest(self, name, round_index=0):
        with open_reader(self.store) as reader:
            (run,) = queries.list_runs(reader)
            return reader.history(run.id).latest(name, round_index)


def test_a_site_counts_as_whom_the_server_has_authenticated_whatever_its_message_says(tmp_path):
    job = Job(tmp_path)
    mine, others = job.ask("site-1", peer="site-2"), job.ask("site-2")
    job.answer("site-1", others, result(changed(model(), 9.0)), peer="site-2")  # another's task
    job.answer("site-1", mine, result(changed(model(), 0.5)), peer="site-2")
    job.answer("site-2", others, result(changed(model(), 1.0)))
    (cohort,) = job.events("cohort")
    assert sorted(cohort.data["answered"]) == ["site-1", "site-2"]
    assert cohort.data["late"] == ["site-3"]
    norms = job.latest("update.norm")
    assert norms["site-2"] == pytest.approx(2 * norms["site-1"], rel=1e-5)


def test_our_header_is_gone_before_the_workflow_sees_the_result(tmp_path):
    job = Job(tmp_path)
    reply = result(changed(model(), 0.5))
    reply.set_header(KEY, ResultEnvelope(b"", 1.0, 2.0, 1.0, 0.1).header())
    before = from_shareable(reply).data
    job.answer("site-1", job.ask("site-1"), reply)
    assert reply.get_header(KEY) is None
    assert from_shareable(reply).data is before
    assert not job.events("telemetry.refused")


def test_a_failure_is_told_once_by_the_message_of_whoever_knows_the_task(tmp_path):
    job = Job(tmp_path, tracebacks=True)
    task = job.ask("site-1")
    header = ResultEnvelope(b"", 1.0, 2.0, 1.0, 0.1, SiteFailure("KeyError", "x", "Traceback")).header()
    tell = job.handlers[server_component.TOPIC]
    for task_id in ("a guess", 7, None, task, task):
        assert tell(server_component.TOPIC, Shareable({"task_id": task_id, KEY: header}), FLContext()) is not None
    job.answer("site-1", task, failed())
    (event,) = job.events("client.failed")
    assert (event.where.node, event.data["exception"]) == ("site-1", "KeyError")


def test_filters_of_the_job_are_stated_and_those_that_results_name_only_if_most_do(tmp_path):
    stated = Job(tmp_path, filters=["ModelQuantizer"])
    (event,) = stated.events("updates.transformed")
    assert "ModelQuantizer" in event.data["stated"]
    (tmp_path / "other").mkdir()
    named = Job(tmp_path / "other")
    for site in SITES:
        reply = result(changed(model(), 0.5))
        from_shareable(reply).meta["filter_history"] = ["SVTPrivacy"] if site == "site-1" else []
        named.answer(site, named.ask(site), reply)
    assert not named.events("updates.transformed")


def test_what_ends_a_job_is_reported(tmp_path):
    job = Job(tmp_path)
    job.ask("site-1")
    job.fire(EventType.FATAL_SYSTEM_ERROR, EVENT_DATA="too few good results")
    (event,) = job.events("round.failed")
    assert event.where.round == 0


def test_who_had_not_answered_when_the_job_was_aborted_is_not_late(tmp_path):
    job = Job(tmp_path)
    job.ask("site-1")
    job.runner.abort_signal = SimpleNamespace(triggered=True)
    job.fire(EventType.END_WORKFLOW)
    (event,) = job.events("job.aborted")
    assert event.data["working"] == ["site-1"]
    assert event.message.endswith("in round 0. Still at work: site-1.")
    assert not job.events("update.late")


def test_a_round_is_known_by_the_event_that_starts_it_and_ends_with_the_next(tmp_path):
    job = Job(tmp_path)
    for round_index in range(3):
        job.fire(AppEventType.ROUND_STARTED, **{AppConstants.CURRENT_ROUND: round_index})
        for site in SITES:
            job.answer(site, job.ask(site, round_index), result(changed(model(), 0.5)))
    assert [event.where.round for event in job.events("cohort")] == [0, 1, 2]


def test_a_monitor_that_cannot_be_costs_the_job_nothing(tmp_path, caplog):
    job = Job(tmp_path, probes="no such preset")
    job.answer("site-1", job.ask("site-1"), result(changed(model(), 0.5)))
    assert "fedvitals does not watch this job" in caplog.text
    assert not job.store.exists()


class ServerSideController:
    """Named as NVFlare's own, of workflows that sites run among themselves."""


def test_a_workflow_that_the_server_does_not_see_is_not_called_free_of_findings(tmp_path, capsys):
    job = Job(tmp_path, controllers=[ServerSideController()])
    live = str(job.watch._rounds.monitor.findings())
    job.fire(EventType.END_RUN)
    reason = "clients train and aggregate among themselves in this workflow"
    assert live.startswith(f"Not judged, because {reason}")
    for verb in ("findings", "show", "runs"):
        with pytest.raises(SystemExit):
            main([verb, *([] if verb == "runs" else ["digits"]), "--store", str(job.store)])
        shown = " ".join(capsys.readouterr().out.split())
        assert "No findings" not in shown
        assert "healthy" not in shown.lower()
        assert verb == "runs" or f"Not judged, because {reason}" in shown
