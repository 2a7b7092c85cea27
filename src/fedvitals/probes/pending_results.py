# SPDX-License-Identifier: Apache-2.0
"""The measurements of a client whose training has ended, until they are copied from a device and merged.

Holds no objects of the user: pending results keep neither the model nor an optimiser alive.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from fedvitals.catalog import CATALOG, public_name
from fedvitals.errors import ConfigError, UnsuitedError, unknown
from fedvitals.kernels import GradientRecorder
from fedvitals.probes.gradients import summarise
from fedvitals.probes.host_copies import HostCopies
from fedvitals.probes.instruments import Instruments
from fedvitals.probes.presets import Planned
from fedvitals.probes.ranks import Gathered
from fedvitals.probes.results import Results
from fedvitals.probes.snapshot import MeasuredUpdate
from fedvitals.probes.token_counts import CountedTokens
from fedvitals.probes.training_losses import MeasuredLosses
from fedvitals.probes.weights import movement, whole_model
from fedvitals.records import group_table
from fedvitals.schedule import at_exit, budget
from fedvitals.stats import FAMILIES, Array, merge

Report = Callable[[Exception, str], None]
Rows = list[list[tuple[int, Mapping[str, Any]]]]  # for each probe: the steps, and the measurements at each
Gather = Callable[[list[Array], list[Array]], Gathered]
PERPLEXITIES = {"before": ("train.loss_first", "fit.loss_before"), "after": ("train.loss_last", "fit.loss_after")}
MOST_NATS = 100.0  # a larger loss has no meaningful perplexity


@dataclass(frozen=True, slots=True)
class StepTotals:
    """A client's optimiser steps.

    Their number, how many were skipped, norms before clipping, the optimiser's settings by metric, losses, and tokens.
    """

    steps: int
    skipped: int | Tensor  # possibly on a device, like all of these
    unclipped_norms: Sequence[Tensor | Array]
    settings: Mapping[str, float | Tensor] = field(default_factory=dict)
    losses: MeasuredLosses | None = None
    tokens: CountedTokens | None = None

    @property
    def additive(self) -> list[Tensor | Array | None]:
        """Return what is summed over the processes that train a model together: the numbers of losses and of tokens."""
        return [None if own is None else own.numbers for own in (self.losses, self.tokens)]

    def on_device(self) -> list[Tensor | Array]:
        """Return what may still be on a device."""
        scalars = [part for part in (self.skipped, *self.settings.values()) if isinstance(part, Tensor)]
        return [*scalars, *(own for own in self.additive if own is not None), *self.unclipped_norms]


class PendingResults:
    """Begins to copy the measurements to the host on creation; `finish` completes the `results`.

    `recorded` is the plan of the gradients measured by `recorders`, `weighed` the index of the weights' probe, with the
    sums of the buffers; `gather` adds sums over the processes that train the model together.
    """

    def __init__(
        self,
        instruments: Instruments,
        results: Results,
        node: str,
        rows: Rows,
        recorded: Planned | None,
        recorders: Sequence[GradientRecorder],
        update: MeasuredUpdate,
        totals: StepTotals,
        weighed: tuple[int, Array | Tensor] | None,
        report: Report,
        gather: Gather | None,
    ) -> None:
        self.results, self.cost = results, 0.0
        self._instruments, self._node, self._report, self._gather = instruments, node, report, gather
        self._rows, self._recorded, self._recorders = rows, recorded, recorders
        self._update, self._totals, self._weighed = update, totals, weighed
        gradients = [own for recorder in recorders for own in recorder.apart]
        for recorder in recorders:
            recorder.forget_parameters()
        at_steps = [values for own in rows for _, measured in own for values in measured.values()]
        probed = [values for values in at_steps if isinstance(values, Tensor)]
        self._gradients = len(gradients)
        self._copied = [*gradients, *probed, *totals.on_device()]
        buffers = [] if weighed is None else [weighed[1]]
        self._copies = HostCopies([*self._copied, *buffers, *update.tensors])
        self._kept_bytes = 0 if update.vector is None else update.vector.nbytes
        instruments.updates.expect(self._kept_bytes)
        if self.awaits_device:  # a probe may reuse the same array for the next client
            self._rows = [[(step, _own(measured)) for step, measured in own] for own in rows]
        for planned in instruments.preset.probes:
            if isinstance(planned.when, budget) and planned.when.granted < planned.when.asked:
                self._tell_thinned(planned, planned.when)

    @property
    def awaits_device(self) -> bool:
        """Whether results are still on a device, and may be awaited later."""
        return self._gather is None and not self._copies.ready

    def finish(self) -> MeasuredUpdate:
        """Complete the results and return the client's update. Waits for results that are not on the host yet."""
        started = time.perf_counter()
        preset, update = self._instruments.preset, self._update
        self.discard()
        on_host = self._fetch()
        self._tell_steps(on_host)
        self._guarded("training losses", functools.partial(self._tell_losses, on_host))
        self._tell_tokens(on_host)
        if self._recorded is not None:
            self._guarded("merging gradients", functools.partial(self._merge_recorded, self._recorded, on_host))
        for index, planned in enumerate(preset.probes):
            self._guarded("merging", functools.partial(self._merge, index, planned, on_host))
        if not preset.brief:
            self.results.take(movement(update))
            self.results.matrices.append(("update", update.rows, None))
        self._tell_perplexity(on_host)
        self.cost += time.perf_counter() - started
        return update

    def _tell_tokens(self, on_host: Mapping[int, Array]) -> None:
        tokens = self._totals.tokens
        if tokens is not None:
            self.results.take(tokens.metrics(on_host[id(tokens.numbers)]))

    def _tell_perplexity(self, on_host: Mapping[int, Array]) -> None:
        tokens = self._totals.tokens
        if tokens is None or not tokens.predicted:
            return
        known = {name: value for name, value, _ in self.results.metrics}
        returned = tokens.losses(on_host[id(tokens.numbers)])
        for when, names in PERPLEXITIES.items():
            loss = returned.get(when) or next((known[name] for name in names if name in known), None)
            if loss is not None and loss < MOST_NATS:
                self.results.take({f"perplexity.{when}": math.exp(loss)})

    def discard(self) -> None:
        """Free the memory for other updates: this one is about to be added, or never will be."""
        self._instruments.updates.expect(-self._kept_bytes)
        self._kept_bytes = 0

    def _fetch(self) -> dict[int, Array]:
        """Return all measurements on the host, by the identity of each tensor."""
        own, update, arrays = self._copied, self._update, self._copies.arrays()
        update.settle(arrays[len(own) + (self._weighed is not None) :])
        if self._gather is not None:
            self._add_ranks(self._gather, arrays)
        if self._weighed is not None and update.weight_rows is not None:
            measured = {"weight": update.weight_rows, **whole_model(update.weight_rows)}
            if len(arrays[len(own)]):
                measured["buffer"] = arrays[len(own)]
            self._rows[self._weighed[0]] = [(max(0, self._totals.steps - 1), measured)]
        return {id(values): array for values, array in zip(own, arrays, strict=False)}

    def _add_ranks(self, gather: Gather, arrays: list[Array]) -> None:
        """Add up the measurements of processes that train the model together: losses, tokens, and sums of shards."""
        copied = {id(own): place for place, own in enumerate(self._copied)}
        places = [copied.get(id(own)) for own in self._totals.additive]
        gradients = arrays[: self._gradients]
        rows, totals = self._update.additive
        own = [np.zeros(0) if place is None else arrays[place] for place in places]
        gathered = gather([*gradients, *rows], [*own, *totals])
        for place, total in zip(places, gathered.totals, strict=False):
            if place is not None:
                arrays[place] = total
        if gathered.sharded:
            arrays[: self._gradients] = gathered.rows[: self._gradients]
            self._update.set_additive(gathered.rows[self._gradients :], gathered.totals[len(places) :])

    def _tell_steps(self, on_host: Mapping[int, Array]) -> None:
        """Report what only the device knew about the steps: skipped ones, and the largest norm before clipping."""
        totals = self._totals
        skipped = on_host.get(id(totals.skipped), totals.skipped)
        if skipped:
            self.results.take({"steps.skipped": skipped})
        self.results.take({name: on_host.get(id(setting), setting) for name, setting in totals.settings.items()})
        unclipped = max((float(on_host[id(norm)]) for norm in totals.unclipped_norms), default=0.0)
        if unclipped:
            self.results.take({"gradient.norm_unclipped": unclipped})

    def _tell_losses(self, on_host: Mapping[int, Array]) -> None:
        losses = self._totals.losses
        if losses is None:
            return
        try:
            metrics, matrices = losses.results(on_host.get(id(losses.numbers)))
        except UnsuitedError:
            self._instruments.unsuited_losses.add((self._node, losses.model))
            raise
        self.results.take(metrics)
        for family, matrix in matrices.items():
            rows = FAMILIES[family].rows
            self.results.matrices.append((family, matrix, None))
            self.results.tables = {**self.results.tables, rows: group_table(rows, len(matrix)).digest}

    def _merge(self, index: int, planned: Planned, on_host: Mapping[int, Array]) -> None:
        """Merge a probe's measurements of single steps into one client-round."""
        arrays: dict[str, list[tuple[int, Array]]] = {}
        for step, measured in self._rows[index]:
            for name, values in measured.items():
                array = on_host[id(values)] if isinstance(values, Tensor) else np.asarray(values)
                if array.ndim == 0:
                    known = name if name in CATALOG else public_name(name)
                    self.results.take({known: array}, None if planned.when is at_exit else step)
                else:
                    self._guarded(f"'{name}'", functools.partial(_check_shape, name, array))
                    if _fits_family(name, array):
                        arrays.setdefault(name, []).append((step, array))
        for family, rows in arrays.items():
            if planned.each:
                self.results.matrices += [(family, array, step) for step, array in rows]
            if family == "gradient":
                self._gradient([step for step, _ in rows], np.stack([array for _, array in rows]))
            else:
                self.results.matrices.append((family, merge(family, [array for _, array in rows]), None))

    def _merge_recorded(self, recorded: Planned, on_host: Mapping[int, Array]) -> None:
        """Merge the recorded measurements: one per step, or one per step and optimiser."""
        taken = [recorder.take([on_host[id(rows)] for rows in recorder.apart]) for recorder in self._recorders]
        steps = [step for own, _ in taken for step in own]
        if not steps:
            return
        rows = np.concatenate([rows for _, rows in taken])
        order = np.argsort(steps, kind="stable")
        steps, rows = [steps[i] for i in order], rows[order]
        if recorded.each:
            self.results.matrices += [("gradient", matrix, step) for step, matrix in zip(steps, rows, strict=True)]
        self._gradient(steps, rows)

    def _gradient(self, steps: list[int], rows: Array) -> None:
        matrices, metrics = summarise(steps, rows)
        self.results.matrices += [(family, matrix, None) for family, matrix in matrices.items()]
        for name, (metric, step) in metrics.items():
            self.results.take({name: metric}, step)
        if "gradient.norm" in metrics:
            norm, before = metrics["gradient.norm"][0], self._instruments.norms.get(self._node)
            if before:
                self.results.take({"gradient.change_round": abs(norm - before) / before})
            self._instruments.norms[self._node] = norm

    def _tell_thinned(self, planned: Planned, schedule: budget) -> None:
        name = planned.name
        data = {"probe": name, "percent": schedule.percent, "asked": schedule.asked, "granted": schedule.granted}
        text = f"{name}: measured at {schedule.granted} of {schedule.asked} steps, to stay in {schedule.percent:g} %"
        self.results.remarks.append(("budget", text, data))
        schedule.asked = schedule.granted = 0

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the training
            self._report(error, what)


def _own(measured: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a probe measured, with copies of arrays on the host."""
    return {name: values if isinstance(values, Tensor) else np.array(values) for name, values in measured.items()}


def _fits_family(name: str, array: Array) -> bool:
    return name in FAMILIES and array.ndim == 2 and array.shape[1] == len(FAMILIES[name].columns)


def _check_shape(name: str, array: Array) -> None:
    if name not in FAMILIES:
        raise ConfigError(f"A probe gave an array. {unknown('family', name, FAMILIES)}")
    columns = len(FAMILIES[name].columns)
    if not _fits_family(name, array):
        raise ConfigError(f"A probe gave '{name}' of shape {array.shape}. This family wants [layers, {columns}].")
