# SPDX-License-Identifier: Apache-2.0
"""A site's side: what is measured in a training script, what of it leaves, and why a task failed."""

import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'fedvitals[nvflare]'")
torch = pytest.importorskip("torch")

from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import make_reply
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.ccwf.client_ctl import ClientSideController
from nvflare.app_common.filters import SVTPrivacy
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.client.config import ConfigKey
from nvflare.client.in_process.api import TOPIC_GLOBAL_RESULT, TOPIC_LOCAL_RESULT, InProcessClientAPI
from nvflare.fuel.data_event.data_bus import DataBus

import fedvitals as fv
from fedvitals.errors import ConfigError
from fedvitals.hosts.nvflare.envelope import KEY, read_envelope
from fedvitals.hosts.nvflare.site import trainer
from fedvitals.hosts.nvflare.site.component import SiteWatch
from fedvitals.hosts.nvflare.site.failures import LOGGERS
from fedvitals.hosts.nvflare.site.settings import SiteSettings
from fedvitals.hosts.startup_path import SITE_FOLDER
from fedvitals.scope import current
from support.nvflare_rounds import JOB, changed, message, model, result, served
from support.waiting import wait_until

SECRET = "patient 4711"


# -- what a site lets go --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "privacy", "tracebacks", "level", "words"),
    [
        ({}, None, False, 2, False),
        ({}, None, True, 3, True),
        ({}, 4, False, 4, False),
        ({"FEDVITALS_PRIVACY": "0"}, 4, True, 0, True),
        ({"FEDVITALS_PRIVACY": "4"}, 1, False, 1, False),
        ({"FEDVITALS_TRACEBACKS": "0"}, None, True, 3, False),
        ({"FEDVITALS_TRACEBACKS": "1"}, None, False, 2, False),
    ],
)
def test_a_site_can_allow_less_than_the_job_asks_for_and_never_gives_more(
    environment, privacy, tracebacks, level, words
):
    settings = SiteSettings.of_job(environment, "standard", privacy, tracebacks=tracebacks)
    assert (settings.level, settings.tracebacks) == (level, words)
    again = SiteSettings.of_trainer(settings.variables({}, "failure.json"))
    assert again == settings


def test_a_level_that_is_none_lets_nothing_go():
    with pytest.raises(ConfigError, match="FEDVITALS_PRIVACY is a level from 0 to 4, got 'much'"):
        SiteSettings.of_job({"FEDVITALS_PRIVACY": "much"}, "standard", None, tracebacks=False)


# -- scripts that use the Client API --------------------------------------------------------------------------------


@pytest.fixture
def api(monkeypatch):
    """NVFlare's Client API for scripts in the site's process, hooked, with what it sends."""
    for name in ("receive", "send"):
        monkeypatch.setattr(InProcessClientAPI, name, getattr(InProcessClientAPI, name))
    monkeypatch.setattr(InProcessClientAPI, trainer.SETTINGS, None, raising=False)
    meta = {
        FLMetaKey.JOB_ID: JOB,
        FLMetaKey.SITE_NAME: "site-1",
        ConfigKey.TASK_NAME: "train",
        ConfigKey.TASK_EXCHANGE: {ConfigKey.TRAIN_TASK_NAME: "train"},
    }
    api = InProcessClientAPI(meta, 0.01)
    api.init()
    api.sent = []
    api.data_bus.subscribe([TOPIC_LOCAL_RESULT], lambda _topic, data, _bus: api.sent.append(data))
    yield api
    api.close()
    DataBus().subscribers.pop(TOPIC_LOCAL_RESULT, None)


def give(api, weights, round_index=0):
    task = FLModel(params=dict(weights), current_round=round_index)
    api.event_manager.fire_event(TOPIC_GLOBAL_RESULT, FLModelUtils.to_shareable(task))


def train_watched(weights):
    network = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    with fv.watch(network, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            network(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
    return changed(weights, 0.5)


def test_a_script_is_measured_between_receive_and_send_and_its_model_stays_its_own(api, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer.watch_client_api(InProcessClientAPI, SiteSettings())
    trainer.watch_client_api(InProcessClientAPI, SiteSettings())  # once is enough
    give(api, model(), 3)
    received = api.receive()
    assert api.receive() is received
    assert current.get().node == "site-1"
    sent = FLModel(params=train_watched(received.params), meta={"mine": 1})
    api.send(sent, clear_cache=False)
    assert current.get() is None
    assert sent.meta == {"mine": 1}
    assert not [*tmp_path.iterdir()]  # fv.watch has no store of its own here
    wait_until(lambda: api.sent, 30, "the result")
    header = from_shareable(api.sent[0]).meta[KEY]
    with served() as (server, sink):
        task = server.ask("site-1", model())
        server.answer("site-1", task, result(sent.params), header)
    steps = [metric.value for metric in sink.metrics("steps") if metric.where.node == "site-1"]
    assert steps == [3.0]
    assert sink.metrics("gradient.norm")
    assert not sink.events("telemetry.refused")


def test_an_error_of_ours_costs_the_script_nothing(api, monkeypatch, caplog):
    trainer.watch_client_api(InProcessClientAPI, SiteSettings(probes="no such preset"))
    give(api, model())
    received = api.receive()
    api.send(FLModel(params=changed(received.params, 0.5)), clear_cache=False)
    wait_until(lambda: api.sent, 30, "the result")
    assert np.array_equal(from_shareable(api.sent[0]).data["dense.bias"], np.full(4, 0.5, np.float32))


# -- the component --------------------------------------------------------------------------------------------------


class Trains(Executor):
    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        return make_reply(ReturnCode.OK)


class Engine:
    def __init__(self):
        self.messages = []

    def fire_and_forget_aux_request(self, topic, request, fl_ctx, optional):
        self.messages.append((topic, request))


class Site:
    """A site whose events are fired by hand."""

    def __init__(self, tmp_path, monkeypatch, filters=(), router=None, **settings):
        for name in ("receive", "send"):
            monkeypatch.setattr(InProcessClientAPI, name, getattr(InProcessClientAPI, name))
        for name in ("PYTHONPATH", "FEDVITALS_PRIVACY", "FEDVITALS_TRACEBACKS", "FEDVITALS_PROBES"):
            monkeypatch.setenv(name, "")
        for name in ("FEDVITALS_NVFLARE_TRAINER", "FEDVITALS_NVFLARE_FAILURE"):
            monkeypatch.setenv(name, "")
        self.engine, self.watch = Engine(), SiteWatch(**settings)
        self.context = FLContext()
        of_job = {"train:out": [*filters]}
        runner = SimpleNamespace(find_executor=lambda _: Trains(), task_result_filters=of_job, task_router=router)
        place = {FLContextKey.RUNNER: runner, FLContextKey.APP_ROOT: str(tmp_path), FLContextKey.CURRENT_JOB_ID: JOB}
        for name, value in place.items():
            self.context.set_prop(name, value, private=name != FLContextKey.CURRENT_JOB_ID)
        monkeypatch.setattr(self.context, "get_engine", lambda: self.engine)
        monkeypatch.setattr(self.context, "get_identity_name", lambda: "site-1")
        monkeypatch.setattr(self.context, "get_job_id", lambda: JOB)
        self.fire(EventType.ABOUT_TO_START_RUN)

    def fire(self, event, **props):
        for name, value in props.items():
            self.context.set_prop(getattr(FLContextKey, name), value, private=True, sticky=False)
        self.watch.handle_event(event, self.context)

    def begin(self):
        self.fire(EventType.BEFORE_TASK_EXECUTION, TASK_DATA=message(model()), TASK_ID="t1", TASK_NAME="train")

    def end(self):
        self.fire(EventType.END_RUN)


@pytest.fixture
def site(tmp_path, monkeypatch):
    sites = []

    def make(**settings):
        sites.append(Site(tmp_path, monkeypatch, **settings))
        return sites[-1]

    yield make
    for made in sites:
        made.end()
    assert not any(logging.getLogger(name).handlers for name in LOGGERS)


def test_an_executor_of_ones_own_is_measured_on_its_thread(site):
    own = site()
    own.begin()
    assert current.get().node == "site-1"
    reply = result(train_watched(model()))
    own.fire(EventType.AFTER_TASK_EXECUTION, TASK_RESULT=reply)
    assert current.get() is None
    with served() as (server, sink):
        server.answer("site-1", server.ask("site-1", model()), reply, reply.get_header(KEY))
    assert [metric.value for metric in sink.metrics("steps")] == [3.0]


@pytest.mark.parametrize("tracebacks", [False, True])
def test_an_executor_that_raises_is_told_of_by_a_message_because_its_result_comes_after_all_events(site, tracebacks):
    own = site(tracebacks=tracebacks)
    own.begin()
    try:
        raise ValueError(SECRET)  # noqa: TRY301 - what an executor does
    except ValueError:
        logging.getLogger(LOGGERS[1]).error("Processing error")  # noqa: TRY400 - as NVFlare logs it
    own.fire(EventType.BEFORE_SEND_TASK_RESULT)
    assert current.get() is None
    ((_, told),) = own.engine.messages
    failure = read_envelope(told[KEY], 1e9).failure
    assert (told["task_id"], failure.exception) == ("t1", "ValueError")
    assert (SECRET in failure.message) is tracebacks
    assert (SECRET in failure.traceback) is tracebacks


def test_a_script_in_a_process_of_its_own_leaves_its_last_exception_for_the_site(site, tmp_path):
    own = site(tracebacks=True)
    own.begin()
    code = f"def train():\n    raise KeyError('{SECRET}')\ntrain()\n"
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(SITE_FOLDER)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"KeyError: '{SECRET}'" in done.stderr
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    own.fire(EventType.AFTER_TASK_EXECUTION, TASK_RESULT=reply)
    failure = read_envelope(reply.get_header(KEY), 1e9).failure
    assert failure.exception == "KeyError"
    assert "in train" in failure.traceback
    assert not [*tmp_path.iterdir()]


def test_where_a_filter_hides_the_site_its_telemetry_does_not_tell_either(site, caplog):
    own = site(filters=[SVTPrivacy()], privacy=3, tracebacks=True)
    assert "SVTPrivacy" in caplog.text
    own.begin()
    reply = result(train_watched(model()))
    own.fire(EventType.AFTER_TASK_EXECUTION, TASK_RESULT=reply)
    with served(privacy=3) as (server, sink):
        server.answer("site-1", server.ask("site-1", model()), reply, reply.get_header(KEY))
    assert not sink.metrics("gradient.norm")
    assert sink.metrics("time.client")


def test_a_failure_file_that_is_none_is_ignored(site, tmp_path):
    own = site()
    own.begin()
    own.watch._failure_file.write_text(json.dumps(["no", "failure"]))
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    own.fire(EventType.AFTER_TASK_EXECUTION, TASK_RESULT=reply)
    assert read_envelope(reply.get_header(KEY), 1e9).failure is None


def test_in_swarm_learning_a_script_tells_nothing_because_its_result_goes_to_another_site(tmp_path, monkeypatch):
    class Swarm(ClientSideController):
        def do_learn_task(self, name, data, fl_ctx, abort_signal): ...
        def start_workflow(self, shareable, fl_ctx, abort_signal): ...

    router = SimpleNamespace(task_table={"swarm_*": object.__new__(Swarm)})
    own = Site(tmp_path, monkeypatch, router=router)
    assert not os.environ["FEDVITALS_NVFLARE_TRAINER"]
    assert not hasattr(InProcessClientAPI.receive, trainer.MARK)
    own.end()
