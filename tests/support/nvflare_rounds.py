# SPDX-License-Identifier: Apache-2.0
"""Rounds of an NVFlare server by hand: real messages of NVFlare, without its network."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants

import fedvitals as fv
from fedvitals.hosts.nvflare import models, task_results
from fedvitals.hosts.nvflare.server_rounds import ServerRounds, SiteRequest

JOB = "job-1"
_IDS = itertools.count()


def model(value: float = 1.0) -> dict[str, Any]:
    """A model as NVFlare's server holds it."""
    generator = np.random.default_rng(0)
    return {
        "dense.weight": value * generator.normal(size=(4, 3)).astype(np.float32),
        "dense.bias": np.zeros(4, np.float32),
        "norm.running_mean": np.ones(4, np.float32),
        "norm.num_batches_tracked": np.array(3),
    }


def changed(weights: Mapping[str, Any], by: float) -> dict[str, Any]:
    """The same after training: each value that is trained grew."""
    return {name: values + np.float32(by) if values.dtype == np.float32 else values for name, values in weights.items()}


def message(
    weights: Mapping[str, Any], kind: str = DataKind.WEIGHTS, round_index: int | None = 0, **meta: Any
) -> Shareable:
    """A task or a result."""
    shareable = DXO(kind, dict(weights), dict(meta)).to_shareable()
    if round_index is not None:
        shareable.set_header(AppConstants.CURRENT_ROUND, round_index)
    return shareable


def result(
    weights: Mapping[str, Any], kind: str = DataKind.WEIGHTS, metrics: Any = None, steps: float = 4
) -> Shareable:
    """What a site sends back."""
    meta: dict[str, Any] = {MetaKey.NUM_STEPS_CURRENT_ROUND: steps}
    if metrics is not None:
        meta[MetaKey.INITIAL_METRICS] = metrics
    return message(weights, kind, None, **meta)


def failed(code: str = ReturnCode.EXECUTION_EXCEPTION) -> Shareable:
    """The result of a task that failed."""
    return make_reply(code)


class HandServer:
    """Does what the server's component does on NVFlare's events."""

    def __init__(self, monitor: Any, **settings: Any) -> None:
        self.rounds = ServerRounds(monitor, JOB, **{"guard_mode": "report", **settings})

    def ask(
        self, node: str, weights: Mapping[str, Any], round_index: int | None = 0, task: str = "train", targets=()
    ) -> str:
        """Send a task to a site, and give the task's id."""
        data, task_id = message(weights, round_index=round_index), f"task-{next(_IDS)}"
        request = SiteRequest(node, task, 0, _now(), models.bytes_of(data), data)
        self.rounds.task_fetched(task_id, request, round_index, targets)
        return task_id

    def answer(self, node: str, task_id: str, reply: Shareable, header: Any = None) -> str | None:
        """Take a site's result, if it answers a task of that site; give why the job must end."""
        self.rounds.result_arrived(task_id)
        request = self.rounds.take_request(task_id, node)
        return None if request is None else task_results.read_result(self.rounds, request, reply, header)


@contextlib.contextmanager
def served(*, ours_may_fail: bool = False, guard: str = "report", **settings: Any):
    """A server by hand and the sink that keeps what its monitor records."""
    from fedvitals.testing import MemorySink

    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], **{"machine": False, "detectors": (), **settings}) as monitor:
        monitor.host.describe("nvflare", {})
        server = HandServer(monitor, guard_mode=guard)
        yield server, sink
        server.rounds.end()
    assert ours_may_fail or not sink.events("monitor.error"), sink.events("monitor.error")


def _now() -> float:
    import time

    return time.time()
