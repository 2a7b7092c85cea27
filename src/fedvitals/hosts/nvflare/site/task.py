# SPDX-License-Identifier: Apache-2.0
"""One training task while a site works on it: the scope that `fv.watch` finds, and the telemetry at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack

from fedvitals.hosts import array_models
from fedvitals.hosts.array_models import Values
from fedvitals.hosts.nvflare.envelope import ResultEnvelope, journey_id, run_name, trace_id
from fedvitals.hosts.nvflare.site.settings import SiteSettings
from fedvitals.hosts.telemetry_budget import telemetry_budget
from fedvitals.monitor.workers import WorkerObserver
from fedvitals.probes.allowance import Turn
from fedvitals.records import Layer, LayerTable
from fedvitals.resources.process_start import process_started
from fedvitals.transport.privacy import WORDS


class SiteTask:
    """A training task that has begun. `start`: the model that the site was sent, if its layers may be reported."""

    def __init__(
        self,
        settings: SiteSettings,
        job_id: str,
        site: str,
        round_index: int | None,
        start: Mapping[str, Values] | None = None,
    ) -> None:
        self._site = site
        self._start = start if settings.level >= WORDS else None
        self._received, self._cpu = time.time(), time.process_time()
        self._worker = WorkerObserver(
            run=run_name(job_id),
            name="nvflare",
            preset=settings.probes,
            policy=settings.policy,
            strict=False,
            round=None,  # known to the server
            trace=trace_id(job_id),
            span=journey_id(job_id, site, round_index),
            known=frozenset(),
            initial=None,
            turn=Turn(round_index),
        )
        self._worker.payload()  # left over from a failed task
        self._scope = ExitStack()
        self._scope.enter_context(self._worker.client(site))

    def close(self) -> None:
        """Leave the scope; nothing is sent."""
        self._scope.close()

    def finish(self, sent: Mapping[str, Values] | None = None, *, message_bytes: int = 0) -> ResultEnvelope:
        """Leave the scope, and return the task's telemetry.

        `sent`: the model that is returned, if it is one. `message_bytes`: the size of the larger of what was received
        and what is sent.
        """
        self._scope.close()
        if self._start is not None and sent is not None and [*self._start] == [*sent]:
            self._report_update(self._start, sent)
        payload = self._worker.payload(most=telemetry_budget(message_bytes))
        cpu = time.process_time() - self._cpu
        return ResultEnvelope(payload, self._received, time.time(), process_started() or self._received, cpu)

    def _report_update(self, start: Mapping[str, Values], sent: Mapping[str, Values]) -> None:
        """Report statistics per layer of the update, which the server compares with what arrives."""
        dtype = str(array_models.difference_dtype(sent))
        layers = tuple(Layer(name, tuple(values.shape), dtype) for name, values in sent.items())
        table = LayerTable("parameter", layers)
        self._worker.tell_layers(self._site, "update", array_models.update_sums(start, sent), table)
