# SPDX-License-Identifier: Apache-2.0
"""Measures clients that train as one batch: the same numbers as for each alone, for all of them together.

The counterpart of `ClientSession`. Per-client work is arithmetic on arrays [clients, ...]; synchronisation is done once
for the whole stack. Which clients are measured is decided for each, as if it trained alone. Timings are a client's
share of the stack's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedvitals.catalog import CATALOG
from fedvitals.kernels import sums
from fedvitals.kernels.cuda.sums import upload
from fedvitals.probes.allowance import training_work
from fedvitals.probes.fit import label_entropy, labels_of, labels_remark
from fedvitals.probes.full_gradient import full_gradient
from fedvitals.probes.gradients import gradient_histogram, gradients, last_gradient, summarise
from fedvitals.probes.instruments import Instruments
from fedvitals.probes.node_columns import EVERY, NodeColumns, Rows
from fedvitals.probes.nonlinearity import nonlinearity
from fedvitals.probes.pending_results import Report
from fedvitals.probes.presets import Planned
from fedvitals.probes.scale import scale, seed_of
from fedvitals.probes.session import LABEL_ROUNDS
from fedvitals.probes.stacked.fit import Batch, StackFit, fill_rows, sample_counts
from fedvitals.probes.stacked.full_gradient import stacked_full_gradient
from fedvitals.probes.stacked.model import StackModel, rows_of
from fedvitals.probes.stacked.nonlinearity import stacked_nonlinearity
from fedvitals.probes.stacked.recorder import HostSums, StackHistogram, StackRecorder
from fedvitals.probes.stacked.scale import stacked_scale
from fedvitals.probes.stacked.training_losses import stacked_losses
from fedvitals.probes.view import View
from fedvitals.probes.weights import weights
from fedvitals.protocols import Moment
from fedvitals.schedule import always, at_exit
from fedvitals.stack import Stack
from fedvitals.stats import INFS, NANS, SUM, SUM_MAGNITUDES, SUM_SQUARES, Array


class StackSession:
    """Starts on creation; call `step` before each optimiser step.

    `finish` returns the clients' results in order.
    """

    def __init__(
        self, instruments: Instruments, fit: StackFit, stack: Stack, round_index: int | None, report: Report
    ) -> None:
        began = time.perf_counter()
        self._instruments, self._fit, self._stack, self._report = instruments, fit, stack, report
        self._model = StackModel(stack)
        self._view = View(stack.module, round_index=round_index)
        self._columns = NodeColumns([*zip(stack.nodes, stack.groups, strict=True)])
        self._due_rows: npt.NDArray[np.bool_] | None = None  # clients due for the running probe; None: all
        self._steps = 0
        self._step_began = self._step_seconds = 0.0
        self._batches: list[Batch] = []
        self._changed_rows: Collection[int] = ()  # of clients whose data changed since they last took part
        self._turn = instruments.turns.of(None, round_index)
        self._before = self._last = self._model.matrix.detach().clone()
        self._changes: list[Tensor] = []  # [2, clients] per step: signed and absolute
        size = (self._model.clients, self._model.sizes, self._model.trained)
        host = None if stack.sums is None else HostSums(stack.sums, every=True)
        self._recorder = next(((i, p, self._recorder_of(p, host)) for i, p in self._at_steps(gradients)), None)
        self._histogram = next(((i, p, StackHistogram(*size)) for i, p in self._at_steps(gradient_histogram)), None)
        plan = enumerate(instruments.preset.probes)
        self._scaled = [(i, p, p.probe) for i, p in plan if isinstance(p.probe, scale) and p.when is not at_exit]
        closing = any(p.probe is last_gradient for p in instruments.preset.probes)
        self._closing = (host or StackRecorder(*size, keep=stack.steps is not None)) if closing else None
        self._host = host
        self._own_numbers: Tensor | None = None  # number of steps, on the gradients' device
        self._guarded("fit", self._fit_before)
        self._began = self._step_began = time.perf_counter()
        self.cost = self._began - began

    def _at_steps(self, probe: Any) -> list[tuple[int, Planned]]:
        planned_probes = enumerate(self._instruments.preset.probes)
        return [(i, planned) for i, planned in planned_probes if planned.probe is probe and planned.when is not at_exit]

    def _recorder_of(self, planned: Planned, host: HostSums | None) -> StackRecorder | HostSums:
        if host is None or self._stack.sums is None:
            return StackRecorder(self._model.clients, self._model.sizes, self._model.trained)
        return host if planned.when is always else HostSums(self._stack.sums, every=False)

    def step(self, step: int, gradients: Tensor) -> None:
        """Measure before an optimiser step, without synchronising."""
        now = time.perf_counter()
        self._step_seconds, self._step_began = now - self._step_began, now
        try:
            gradients = gradients.detach()
            if self._instruments.preset.difference_each_step and step == self._steps > 0:
                self._difference()
            self._steps = max(self._steps, step + 1)
            if self._closing is not None:
                self._closing.record(step, gradients)
            if self._recorder is not None:
                index, planned, recorder = self._recorder
                self._measure(step, index, planned, functools.partial(recorder.record, step, gradients))
            if self._histogram is not None:
                index, planned, histogram = self._histogram
                self._measure(step, index, planned, lambda: histogram.record(self._of_active(gradients, step)))
            for index, planned, probe in self._scaled:
                self._view.step = step
                self._measure(step, index, planned, functools.partial(self._scale, probe, step))
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the training
            self._report(error, "measuring a step")
        self.cost += time.perf_counter() - now

    def finish(self) -> tuple[NodeColumns, Tensor, Array | None]:
        """Return the clients' results, their updates, [clients, weights], and the nine sums of these.

        The sums are None if the preset is brief.
        """
        ended = time.perf_counter()
        instruments, model = self._instruments, self._model
        if self._host is not None:  # a host that records itself need not call us at each step
            self._guarded("the host's sums", self._count_host_steps)
        own = self._own_steps()
        for node, count in zip(self._stack.nodes, own, strict=True):
            instruments.turns.note(node, count)
        self._columns.put("steps", own)
        if self._steps and not instruments.preset.brief:
            self._columns.put("time.step", (ended - self._began) / sum(own))
        if any(planned.when is not at_exit for planned in instruments.preset.probes):
            self._view.step = max(0, self._steps - 1)  # as counted for a client that trains alone
        if instruments.preset.difference_each_step and self._steps:
            self._guarded("weight differences", self._tell_differences)
        self._guarded("merging gradients", self._merge)
        self._guarded("training losses", self._tell_losses)
        for index, planned in enumerate(instruments.preset.probes):
            if planned.when is at_exit:
                self._guarded(f"the probe '{planned.name}'", functools.partial(self._run_at_exit, index, planned))
        update = model.matrix.detach() - self._before
        rows = None
        if not instruments.preset.brief:
            rows = model.trained_rows(_to_host(sums(model.layers(update), clients=True)))
            self._move(rows)
        update = model.trained_columns(update)
        if self._batches:
            self._guarded("fit", self._fit_after)
        self.cost += time.perf_counter() - ended
        return self._columns, update, rows

    # -- at each step -------------------------------------------------------------------------------------------------

    def _measure(self, step: int, index: int, planned: Planned, work: Callable[[], None]) -> None:
        """Do the work if its schedule allows this step, and record its cost."""
        started, costs = time.perf_counter(), self._instruments.costs
        if planned.when is always or planned.when(
            Moment(self._view.round, None, step, self._step_seconds, costs[index])
        ):
            work()
            costs[index] += time.perf_counter() - started

    def _count_host_steps(self) -> None:
        assert self._host is not None  # noqa: S101 - asked by the caller
        self._steps = max(self._steps, len(self._host.steps))

    def _own_steps(self) -> list[int]:
        """Return how many steps each client has taken so far."""
        steps_of_clients = self._stack.steps
        return (
            [self._steps] * self._model.clients
            if steps_of_clients is None
            else [min(self._steps, own) for own in steps_of_clients]
        )

    def _last_steps(self) -> list[int]:
        return [max(0, count - 1) for count in self._own_steps()]

    def _of_active(self, gradients: Tensor, step: int) -> Tensor:
        """Return the gradients with zeros, which no histogram counts, for clients that are idle at this step."""
        if self._stack.steps is None or min(self._stack.steps) > step:
            return gradients
        if self._own_numbers is None:
            self._own_numbers = upload(torch.tensor(self._stack.steps), gradients.device)
        return torch.where((self._own_numbers > step)[:, None], gradients, 0.0)

    def _difference(self) -> None:
        """Record `weight.difference` of one iteration, before the next one."""
        now = self._model.matrix.detach().clone()
        change = now - self._last
        if change.is_cuda:  # the same sums, but without writing all numbers in float64 first
            absolute = torch.linalg.vector_norm(change, 1, dim=1, dtype=torch.float64)
            self._changes.append(torch.stack([change.sum(1, dtype=torch.float64), absolute]))
        else:
            change = change.double()
            self._changes.append(torch.stack([change.sum(1), change.abs().sum(1)]))
        self._last = now

    def _tell_differences(self) -> None:
        self._difference()
        for step, (signed, absolute) in enumerate(torch.stack(self._changes).cpu().numpy()):
            self._put("weight.difference", signed, step=step)
            self._put("weight.difference_absolute", absolute, step=step)

    # -- at the end ---------------------------------------------------------------------------------------------------

    def _put(
        self, name: str, values: Array, present: npt.NDArray[np.bool_] | None = None, step: int | None = None
    ) -> None:
        """Add one metric, [clients], for the clients that have it (None: all), are due, and took this step."""
        rows = self._rows(present, step)
        self._columns.put(name, values[rows], rows, step)

    def _rows(self, present: npt.NDArray[np.bool_] | None = None, step: int | None = None) -> Rows:
        steps = self._stack.steps
        took = None if step is None or steps is None else np.asarray(steps) > step
        masks = [mask for mask in (present, self._due_rows, took) if mask is not None and not mask.all()]
        return np.flatnonzero(np.logical_and.reduce(masks)) if masks else EVERY

    def _put_all(self, metrics: Mapping[str, Array], step: int | None = None) -> None:
        for name, values in metrics.items():
            numbers = np.ma.getdata(values)
            present = ~np.ma.getmaskarray(values)
            if name in CATALOG and CATALOG[name].rare:  # NaN means that this client has none
                present &= ~np.isnan(numbers)
            self._put(name, numbers, present, step)

    def _put_matrices(self, family: str, matrices: Array, step: int | None = None) -> None:
        rows = self._rows(step=step)
        self._columns.put_matrices(family, matrices[rows], rows, step)

    def _merge(self) -> None:
        if self._recorder is not None and self._recorder[2].steps:
            _, planned, recorder = self._recorder
            rows = recorder.take()
            if planned.each:
                for step, matrices in zip(recorder.steps, rows, strict=True):
                    self._put_matrices("gradient", self._model.trained_rows(matrices), step)
            own = np.asarray(self._own_steps())
            for count in np.unique(own[own > 0]).tolist():
                steps = [step for step in recorder.steps if step < count]
                if steps:
                    members = np.flatnonzero(own == count)
                    every = slice(None) if len(members) == len(own) else members  # a view, if possible
                    self._gradient(steps, rows[: len(steps), every], members)
        counts = None if self._histogram is None else self._histogram[2].take()
        if counts is not None:
            self._put_matrices("gradient.histogram", self._model.trained_rows(counts))

    def _gradient(self, steps: list[int], rows: Array, members: npt.NDArray[np.intp]) -> None:
        """Summarise the steps of these clients at once, like `summarise`. rows: [steps, clients, layers, 9]."""
        count, clients, layers, _ = rows.shape
        columns, of_step = self._columns, np.asarray(steps)
        merged, _ = summarise(steps, rows.reshape(count, clients * layers, -1))
        for family, matrix in merged.items():
            columns.put_matrices(family, self._model.trained_rows(matrix.reshape(clients, layers, -1)), members)
        whole = np.sqrt(rows[..., SUM_SQUARES].sum(axis=2))  # [steps, clients]
        mean, largest, client = whole.mean(axis=0), whole.argmax(axis=0), np.arange(clients)
        columns.put("gradient.norm", mean, members)
        columns.put("gradient.norm_max", whole[largest, client], members, of_step[largest])
        columns.put("gradient.norm_last", whole[-1], members, steps[-1])
        columns.put("gradient.nonfinite", (rows[..., NANS] + rows[..., INFS]).sum(axis=(0, 2)), members)
        if count > 1:
            with np.errstate(divide="ignore", invalid="ignore"):
                relative = np.abs(whole[1:] - whole[:-1]) / whole[:-1]
            change = np.where(whole[1:] == whole[:-1], 0.0, relative)
            most = change.argmax(axis=0)
            columns.put("gradient.change", change[most, client], members, of_step[1:][most])
        norms = dict(zip((self._stack.nodes[row] for row in members.tolist()), mean.tolist(), strict=True))
        before = np.array([self._instruments.norms.get(node) or 0.0 for node in norms])
        known = before != 0
        with np.errstate(all="ignore"):
            changes = np.abs(mean - before) / before
        columns.put("gradient.change_round", changes[known], members[known])
        self._instruments.norms.update(norms)

    def _tell_losses(self) -> None:
        """Record the optimiser's settings, and training losses if the host keeps what they need."""
        stack, wanted = self._stack, self._instruments.preset.measures_losses(self._view.round)
        for name, numbers in stack.settings.items() if self._steps else ():
            if wanted or name != "batch.size":  # which the loss hook of a client that trains alone reports
                self._columns.put(name, np.asarray(numbers, np.float64))
        if not wanted or stack.outputs is None:
            return
        samples = None if stack.labels is None else sample_counts(stack)
        losses = stacked_losses(stack.module, stack.outputs(), self._own_steps(), samples)
        if losses is None:
            return
        measured = losses.samples > 0
        for name, values in losses.metrics.items():
            self._put(name, values, measured & ~np.isnan(values) if CATALOG[name].rare else measured)
        rows = np.flatnonzero(measured)
        for family, matrices in losses.tables.items():
            self._columns.put_matrices(family, matrices[rows], rows)

    def _run_at_exit(self, index: int, planned: Planned) -> None:
        """Run a probe at the end of the scope for the clients that are due in this round."""
        rows = [] if (self._turn.round_index or 0) % planned.rounds else self._due(index, planned)
        if not rows:
            return
        started = time.perf_counter()
        self._due_rows = np.zeros(self._model.clients, np.bool_)
        self._due_rows[rows] = True
        try:
            self._run(planned, rows)
        finally:
            self._due_rows = None
            self._instruments.costs[index] += time.perf_counter() - started

    def _due(self, index: int, planned: Planned) -> list[int]:
        """Return the rows of the clients whose training allows the probe."""
        allowance, stack = self._instruments.allowances[index], self._stack
        if not allowance.percent:
            return [] if allowance.percent == 0 else [*range(self._model.clients)]
        silent = set(stack.silent)
        clients = zip(stack.nodes, sample_counts(stack), self._own_steps(), strict=True)
        return [
            row
            for row, (node, own, steps) in enumerate(clients)
            if node not in silent
            and allowance.due(node, self._turn, planned.work(own), training_work(own, steps, None))
        ]

    def _run(self, planned: Planned, rows: Sequence[int]) -> None:
        probe = planned.probe
        if probe is weights:
            self._weights()
        elif probe is last_gradient and self._closing is not None and self._closing.steps:
            taken = self._closing.take()
            # Each client's own last step; the only one kept, if all are equal.
            last = taken[np.minimum(self._last_steps(), len(taken) - 1), np.arange(self._model.clients)]
            self._put("gradient.norm_last", np.sqrt(last[..., SUM_SQUARES].sum(axis=1)))
            self._put("gradient.nonfinite", (last[..., NANS] + last[..., INFS]).sum(axis=1))
        elif isinstance(probe, scale):
            self._scale(probe, rows=rows)
        elif probe is full_gradient:
            self._full_gradient()
        elif isinstance(probe, nonlinearity) and probe.images != "all":
            self._nonlinearity(int(probe.images))

    def _scale(self, probe: scale, step: int | None = None, rows: Sequence[int] | None = None) -> None:
        """Measure the gradient scale of the clients in these rows; None: all."""
        rows = range(self._model.clients) if rows is None else rows
        images = self._fewest() if probe.images == "all" else int(probe.images)
        x = rows_of(torch.as_tensor(self._stack.samples(images)[0]), rows).to(self._model.states.device)
        if x.shape[1]:
            seeds, metrics = self._seeds(), dict[str, Array]()
            own = stacked_scale(probe, self._model.of_clients(rows), x, [seeds[row] for row in rows])
            fill_rows(metrics, own, rows, self._model.clients)
            self._put_all(metrics, step)

    def _full_gradient(self) -> None:
        if self._stack.loss is None:
            return
        x, y = (torch.as_tensor(part).to(self._model.states.device) for part in self._stack.samples(self._fewest()))
        rows = [_to_host(part) for part in stacked_full_gradient(self._model, x, y, self._stack.loss)]
        self._put_matrices("gradient.full", self._model.trained_rows(np.concatenate(rows)))

    def _fewest(self) -> int:
        """Return the smallest number of samples of any client: all of them, if they are divided equally."""
        return min((len(own) for own in self._stack.labels or ()), default=0)

    def _seeds(self) -> list[int]:
        """Return every client's seed at this step; for a client that has finished, of its last step."""
        now, seeds = self._view.step, []
        for node, own in zip(self._stack.nodes, self._last_steps(), strict=True):
            self._view.node, self._view.step = node, min(now, own)
            seeds.append(seed_of(self._view))
        self._view.step = now
        return seeds

    def _weights(self) -> None:
        model = self._model
        rows = model.trained_rows(_to_host(sums(model.layers(model.matrix.detach()), clients=True)))
        self._put_matrices("weight", rows)
        self._put("weight.norm", np.sqrt(rows[..., SUM_SQUARES].sum(axis=1)))
        self._put("weight.nonfinite", (rows[..., NANS] + rows[..., INFS]).sum(axis=1))
        if model.buffers:
            self._put_matrices("buffer", _to_host(sums(model.buffer_tensors(), clients=True)))

    def _nonlinearity(self, images: int) -> None:
        x = torch.as_tensor(self._stack.samples(images)[0]).to(self._model.states.device)
        coefficients = np.asarray(stacked_nonlinearity(self._model, x, self._seeds()).tolist())
        self._put("nonlinearity.nlc", coefficients, ~np.isnan(coefficients))

    def _move(self, rows: Array) -> None:
        """Record how far the weights moved: `weights.movement` for all clients."""
        self._put_matrices("update", rows)
        drift = np.sqrt(rows[..., SUM_SQUARES].sum(axis=1))
        initial, now = self._instruments.initial, self._model.trained_columns(self._model.matrix.detach())
        norms = [torch.linalg.vector_norm(self._model.trained_columns(self._before), dim=1)]
        if initial is not None and initial.shape == now.shape[1:]:
            norms.append(torch.linalg.vector_norm(now - initial.to(now.device), dim=1))
        start, *far = np.asarray(torch.stack(norms).tolist())
        self._put("weight.drift", drift)
        self._put("weight.difference", rows[..., SUM].sum(axis=1))
        self._put("weight.difference_absolute", rows[..., SUM_MAGNITUDES].sum(axis=1))
        with np.errstate(all="ignore"):
            self._put("weight.update_ratio", drift / start, start > 0)
        for distances in far:
            self._put("weight.drift_init", distances)

    def _fit_before(self) -> None:
        labels = self._stack.labels
        if labels is not None:
            self._columns.put("samples", [len(own) for own in labels])
        metrics, self._batches = self._fit.received(self._stack, self._model, self._turn)
        self._put_all(metrics)
        if labels is not None and not self._instruments.preset.brief:
            self._guarded("describing clients' data", self._report_data)
            self._tell_labels(labels)

    def _tell_labels(self, labels: Sequence[Any]) -> None:
        """Report the labels of each client when first seen, and again when they change.

        They are checked whenever the data changed, and every few rounds.
        """
        known, entropies = self._instruments.labels, dict[int, float]()
        for row, (node, own) in enumerate(zip(self._stack.nodes, labels, strict=True)):
            due = row in self._changed_rows or not (self._view.round or 0) % LABEL_ROUNDS
            if not due and node in known:
                continue
            histogram = labels_of((own, torch.as_tensor(own)))
            if histogram is None or histogram == known.get(node):
                continue
            known[node], entropies[row] = histogram, label_entropy(histogram)
            self._columns.remarks.append((row, labels_remark(histogram)))
        self._columns.put("label.entropy", [*entropies.values()], np.array([*entropies], np.intp))

    def _report_data(self) -> None:
        """Report a description of each client's data when first seen, and again when they change."""
        stack = self._stack
        if stack.inputs is None or stack.labels is None:
            return
        reports = self._instruments.data.look_at_all(stack.nodes, stack.inputs, stack.labels)
        self._changed_rows = reports.keys()
        for row, (metrics, remark) in reports.items():
            for name, value in metrics.items():
                self._columns.put(name, [value], np.array([row], np.intp))
            self._columns.remarks.append((row, remark))

    def _fit_after(self) -> None:
        self._put_all(self._fit.trained(self._stack, self._model, self._batches))

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the training
            self._report(error, what)


def unmeasured(instruments: Instruments) -> list[str]:
    """Return the preset's probes that need a client's own module, and so do not run for stacked clients."""
    return [planned.name for planned in instruments.preset.probes if not _measured(planned)]


def _measured(planned: Planned) -> bool:
    probe = planned.probe
    if planned.when is not at_exit:
        return probe in (gradients, gradient_histogram) or isinstance(probe, scale)
    if isinstance(probe, nonlinearity):
        return probe.images != "all"
    return isinstance(probe, scale) or probe in (weights, last_gradient, full_gradient)


def _to_host(rows: Array | Tensor) -> Array:
    return rows.cpu().numpy() if isinstance(rows, Tensor) else rows
