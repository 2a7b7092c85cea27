# SPDX-License-Identifier: Apache-2.0
"""A job that runs a scripted federation of `fedvitals.testing` in NVFlare's simulator.

NVFlare copies this file into the job. Its parts get the federation as the path of a file, because NVFlare treats braces
in an argument as a variable's name.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.filter import Filter
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.model import ModelLearnable, make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType

import fedvitals as fv
from fedvitals.hosts.nvflare.envelope import KEY
from fedvitals.hosts.nvflare.server_component import ServerWatch
from fedvitals.testing import ScriptedFederation

TRAIN = "train"
PATIENCE = 1  # seconds for which the server waits for sites that must not answer, when all others have


def federation_of(script: str) -> ScriptedFederation:
    """Return the federation that a file describes."""
    return ScriptedFederation.from_json(Path(script).read_text(encoding="utf-8"))


class ScriptedSite(Executor):  # type: ignore[misc] # NVFlare has no types
    """Trains according to the script; `script`: the file of the federation."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the site's weights; a site whose answer is lost works until the job ends."""
        del task_name
        federation, site = federation_of(self.script), fl_ctx.get_identity_name()
        round_index = shareable.get_header(AppConstants.CURRENT_ROUND)
        weights = federation.train(round_index, site, from_shareable(shareable).data)
        if not federation.answers(round_index, site):
            while not abort_signal.triggered:
                time.sleep(0.1)
        result = DXO(DataKind.WEIGHTS, weights, {MetaKey.NUM_STEPS_CURRENT_ROUND: 1}).to_shareable()
        result.set_header(AppConstants.CURRENT_ROUND, round_index)
        return result


class ForgedTelemetry(Filter):  # type: ignore[misc]
    """Replaces the telemetry in the results of the lying site."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result, with its telemetry modified by the script."""
        header, round_index = shareable.get_header(KEY), shareable.get_header(AppConstants.CURRENT_ROUND)
        if header is not None and round_index is not None:
            site = fl_ctx.get_identity_name()
            payload = federation_of(self.script).telemetry(round_index, site, header["payload"])
            shareable.set_header(KEY, {**header, "payload": payload})
        return shareable


class ScriptedModel(ModelPersistor):  # type: ignore[misc]
    """Provides the server with the script's first model; saves nothing."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        """Return the first model."""
        del fl_ctx
        return make_model_learnable(federation_of(self.script).model(), {})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        """Save nothing."""


class ScriptedServer(FLComponent):  # type: ignore[misc]
    """Notifies the script of rounds and of the end, and sets for how many sites the workflow waits in each round."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script
        self._rounds: Any = None  # of the monitoring component

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Follow the job."""
        federation = federation_of(self.script)
        if event_type == AppEventType.ROUND_STARTED:
            runner, round_index = fl_ctx.get_prop(FLContextKey.RUNNER), fl_ctx.get_prop(AppConstants.CURRENT_ROUND)
            self._rounds = _watch_of(runner)._rounds  # noqa: SLF001 - a study may access internals
            absent = sum(federation.trouble(round_index, site) in ("late", "lost") for site in federation.clients)
            runner.current_wf.controller._min_clients = len(federation.clients) - absent  # noqa: SLF001
            federation.in_round(round_index, self._rounds.close)
        elif event_type == EventType.END_RUN and self._rounds is not None:
            federation.at_end(self._rounds.close)


def _watch_of(runner: Any) -> ServerWatch:
    filters = [entry for chain in runner.config.task_result_filters.values() for entry in chain]
    return next(entry for entry in filters if isinstance(entry, ServerWatch))


def make_job(script: str) -> Any:
    """Return the job of a federation, with NVFlare's scatter and gather."""
    from nvflare.app_common.aggregators import InTimeAccumulateWeightedAggregator  # noqa: PLC0415 - takes a while
    from nvflare.app_common.shareablegenerators import FullModelShareableGenerator  # noqa: PLC0415
    from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather  # noqa: PLC0415
    from nvflare.job_config.api import FedJob  # noqa: PLC0415
    from nvflare.job_config.defs import FilterType  # noqa: PLC0415

    federation = federation_of(script)
    job = FedJob(name=federation.name, min_clients=len(federation.clients))
    controller = ScatterAndGather(
        min_clients=len(federation.clients),
        num_rounds=federation.rounds,
        wait_time_after_min_received=PATIENCE,
        aggregator_id=job.to_server(InTimeAccumulateWeightedAggregator(expected_data_kind="WEIGHTS"), id="aggregator"),
        persistor_id=job.to_server(ScriptedModel(script), id="persistor"),
        shareable_generator_id=job.to_server(FullModelShareableGenerator(), id="shareable_generator"),
        ignore_result_error=True,
        task_check_period=0.1,
    )
    job.to_server(controller)
    job.to_server(ScriptedServer(script), id="script")
    job.to_clients(ScriptedSite(script), tasks=[TRAIN])
    if federation.liar is not None:
        job.to_clients(ForgedTelemetry(script), filter_type=FilterType.TASK_RESULT, tasks=[TRAIN])
    return job


def run_scripted(script: str, store: str, workspace: str) -> None:
    """Run the federation of a file in the simulator, watched."""
    from nvflare.recipe import SimEnv  # noqa: PLC0415

    federation, job = federation_of(script), make_job(script)
    fv.nvflare.attach(job, store, run=federation.name)
    SimEnv(clients=[*federation.clients], workspace_root=workspace).deploy(job)
