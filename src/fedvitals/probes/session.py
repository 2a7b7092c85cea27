# SPDX-License-Identifier: Apache-2.0
"""Measures one client's training: sets hooks at the start, returns numbers at the end, and leaves nothing behind."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedvitals.errors import ConfigError
from fedvitals.kernels import GradientRecorder, is_sharded, sums
from fedvitals.probes import samples
from fedvitals.probes.activations import Take
from fedvitals.probes.allowance import STEP_SAMPLES, training_work
from fedvitals.probes.clipping import ClipWatch
from fedvitals.probes.fit import label_entropy, labels_of, labels_remark
from fedvitals.probes.gradients import gradients
from fedvitals.probes.hooks import StepCounter, StepHooks
from fedvitals.probes.instruments import Instruments
from fedvitals.probes.optimizer_settings import optimizer_settings
from fedvitals.probes.pending_results import PendingResults, Report, StepTotals
from fedvitals.probes.presets import Planned
from fedvitals.probes.rank_watch import RankWatch
from fedvitals.probes.results import Results
from fedvitals.probes.snapshot import MeasuredUpdate, ParameterSnapshot
from fedvitals.probes.token_counts import CountedTokens, count_tokens
from fedvitals.probes.training_losses import MeasuredLosses, TrainingLosses
from fedvitals.probes.training_start import equals, fits, on_load
from fedvitals.probes.view import View, catch_last_input, flatten
from fedvitals.probes.weights import weights
from fedvitals.protocols import Moment
from fedvitals.schedule import always, at_exit

LABEL_ROUNDS = 5
REPLACED = (
    "The weights of this client's model were replaced inside its scope, before its first step: its update is measured "
    "from those that its training began with. With the global model in monitor.round(number, model), or with weights "
    "that are loaded before monitor.client(...), this is certain to be what the client was sent. Reported once per run."
)
REPLACED_BY_OTHERS = (
    "The weights of this client's model were replaced inside its scope, before its first step, by others than the "
    "round's global model has: its update is measured from the global model. Reported once per run."
)
UNFROZEN_SHOWN = 10  # names of layers listed in one event


class Clock(Protocol):
    """Receives a client's steps, to attribute its time (`resources.phases.StepClock`)."""

    def start(self, model: Any) -> None: ...
    def due(self) -> bool: ...
    def begin_step(self, at: float) -> None: ...
    def measured(self, optimizer: Any, skipped: Any) -> None: ...
    def stop(self, steps: int, last: float, measuring: float, inside: float = 0.0) -> None: ...
    def remove(self) -> None: ...


class ClientSession:
    """Starts on creation; `stop` ends it and returns the results, `abandon` ends it without any."""

    def __init__(
        self,
        instruments: Instruments,
        view: View,
        report: Report,
        clock: Clock | None = None,
        ranks: Callable[[], RankWatch] | None = None,
    ) -> None:
        """`ranks` starts to watch the processes that train the model together, if there are several."""
        began = time.perf_counter()
        self._instruments, self._view, self._report, self._clock = instruments, view, report, clock
        self._ranks: RankWatch | None = None
        self.results = Results()
        self._rows: list[list[tuple[int, Mapping[str, Any]]]] = [[] for _ in instruments.preset.probes]
        self._takes: dict[int, Take] = {}
        self._steps, self._data_changed = 0, False  # changed since the client last took part
        self._skipped: int | Tensor = 0
        self._settings: Mapping[str, float | Tensor] = {}
        self._step_began = self._step_seconds = 0.0
        self._sharded = is_sharded(view.parameters)
        self._differences = instruments.preset.difference_each_step and not self._sharded
        self._batch: samples.Batch | None = None
        self.optimizers: list[Optimizer] = []  # those that stepped, known at the end
        self._turn = instruments.turns.of(view.node, view.round)
        view.snapshot = self._snapshot = ParameterSnapshot(view.parameters, instruments.snapshot_buffers)
        if not instruments.preset.brief and view.frozen:
            self._guarded("reading adapters", lambda: self.results.take(instruments.adapters.facts_of(view)))
        self._last = self._snapshot.vector if self._differences else None
        if view.data is not None:
            self._guarded("fit", self._fit_before)
        at_steps = [(i, p) for i, p in enumerate(instruments.preset.probes) if p.when is not at_exit]
        self._recorded = next(((i, p) for i, p in at_steps if p.probe is gradients), None)
        self._weighed: int | None = None  # index of `weights`, if due: measured together with the update
        self._recorders: dict[int, tuple[Sequence[Tensor | None], GradientRecorder]] = {}
        prepares = instruments.prepares
        self._stepwise = [(i, p) for i, p in at_steps if p.probe is not gradients and prepares[i] is None]
        self._prepared = [(i, p, prepare) for i, p in at_steps if (prepare := prepares[i]) is not None]
        self._clip = ClipWatch(view.parameters, confirmed=instruments.clipping_seen and bool(at_steps))
        measure = self._measure if clock is None else self._measure_timed
        self._hooks: StepHooks | StepCounter = (
            StepHooks(view.parameters, measure, self._clip.look)
            if at_steps
            else StepCounter(view.parameters, self._begin_training)
        )
        self._on_load = None if self._sharded else on_load(view.model, self._loaded, report)
        self._losses = self._watch_losses()
        self._measured_losses: MeasuredLosses | None = None
        self._tokens = None if instruments.preset.brief else count_tokens(view, report)
        self._counted_tokens: CountedTokens | None = None
        self._last_input = catch_last_input(view, report) if instruments.wants_inputs and view.data is None else None
        self._began = self._step_began = time.perf_counter()
        self.cost = self._set_up = self._began - began
        try:
            self._arm(0)
            self._ranks = None if ranks is None else ranks()
            if clock is not None:
                clock.start(view.model)
        except BaseException:
            self.abandon()  # nobody would hold this session, and its hooks would stay forever
            raise

    def _watch_losses(self) -> TrainingLosses | None:
        """Return the hooks that measure training losses, unless this client's losses are known to be unsuited."""
        view, instruments = self._view, self._instruments
        if not instruments.preset.measures_losses(view.round):
            return None
        if (view.node or "", type(view.model)) in instruments.unsuited_losses:
            return None
        return TrainingLosses(view, functools.partial(_report_losses, self._report))  # not `self`, a cycle

    def _stop_losses(self) -> None:
        if self._losses is not None:
            self._measured_losses = self._losses.stop(self._steps)
            self.cost += self._losses.seconds
            if self._losses.batch is not None:
                self._settings = {**self._settings, "batch.size": self._losses.batch}

    def _count_tokens(self, seconds: float) -> None:
        if self._tokens is not None:
            self._counted_tokens = self._tokens.counted(seconds)

    def abandon(self) -> None:
        """End the session without results."""
        self._remove()
        if self._ranks is not None:
            self._guarded("telling other processes", self._ranks.group.abandon)

    def _remove(self) -> None:
        for handle in (self._ranks, self._clock, self._last_input, self._on_load, self._tokens):
            if handle is not None:
                handle.remove()
        self._hooks.remove()
        self._clip.remove()
        if self._losses is not None:
            self._losses.remove()
        for take in self._takes.values():
            take()
        self._takes.clear()

    def stop(self) -> PendingResults:
        """End the session: take the last measurements, and begin to copy them to the host.

        Does not wait for a device, except in probes with passes of their own (gradient scale, fit).
        """
        ended = time.perf_counter()
        if self._clock is not None:
            inside = 0.0 if self._losses is None else self._losses.seconds
            self._clock.stop(self._steps, self._step_began, self.cost - self._set_up + inside, inside)
        self.optimizers = self._hooks.optimizers()  # before the hooks are removed
        if isinstance(self._hooks, StepCounter):
            self._steps = self._hooks.steps
        self._guarded("training losses", self._stop_losses)
        self._guarded("counting tokens", lambda: self._count_tokens(ended - self._began))
        self._remove()
        instruments, view = self._instruments, self._view
        instruments.clipping_seen |= self._clip.confirmed
        instruments.turns.note(view.node or "", self._steps)
        view.owned = view.parameters
        for index, planned in enumerate(instruments.preset.probes):
            if planned.when is at_exit:
                self._guarded(f"the probe '{planned.name}'", functools.partial(self._run_at_exit, index, planned))
        pending = self._begin_copies()
        self._snapshot.release()
        self._tell_steps(ended)
        self._tell_unfrozen()
        if self._batch is not None:
            self._guarded("fit", self._fit_after)
        pending.cost = self.cost + time.perf_counter() - ended
        return pending

    def _begin_copies(self) -> PendingResults:
        """Begin to copy everything measured to the host."""
        view, losses, tokens = self._view, self._measured_losses, self._counted_tokens
        return PendingResults(
            self._instruments,
            self.results,
            view.node or "",
            self._rows,
            None if self._recorded is None else self._recorded[1],
            [recorder for _, recorder in self._recorders.values()],
            self._measure_update(),
            StepTotals(self._steps, self._skipped, self._clip.norms, self._settings, losses, tokens),
            None if self._weighed is None else (self._weighed, sums([b for _, b in view.named_buffers])),
            self._report,
            None if self._ranks is None else functools.partial(self._ranks.gather, self.results, self._steps),
        )

    def _measure_update(self) -> MeasuredUpdate:
        """Return the update, measured on its device; as a vector if there is room to compare it with others."""
        instruments = self._instruments
        keep = instruments.compares_updates and instruments.updates.has_room(self._snapshot.update_bytes)
        return self._snapshot.measure(
            keep=keep and not self._sharded,  # no process has a whole sharded one
            sketch=instruments.compares_updates,
            initial=instruments.initial_model,
            weigh=self._weighed is not None,
            brief=instruments.preset.brief,
        )

    def held_bytes(self) -> int:
        """Return the bytes kept for this client and for the run.

        These are copies of its weights, and updates to compare it with.
        """
        held = [t for t in (self._last, self._instruments.initial) if t is not None]
        return self._snapshot.held_bytes + sum(t.nbytes for t in held) + self._instruments.updates.held_bytes

    def _run_at_exit(self, index: int, planned: Planned) -> None:
        """Run a probe at the end of the scope, if it is due in this round and for this client."""
        if (self._turn.round_index or 0) % planned.rounds == 0 and self._due(index, planned):
            if planned.probe is weights:
                self._weighed = index
                return
            measured = self._run(index, planned)
            if measured:
                self._rows[index] = [(max(0, self._steps - 1), measured)]

    def _due(self, index: int, planned: Planned) -> bool:
        """Return whether the training of this client-round allows the probe."""
        view, allowance = self._view, self._instruments.allowances[index]
        if not allowance.percent:
            return allowance.percent is None
        if view.data is not None:
            own, batch = samples.size(view.data), samples.batch_size(view.data)
        else:
            batch = None if view.last_input is None else len(view.last_input)
            own = STEP_SAMPLES if batch is None else batch
        work = training_work(own, self._steps, batch)
        return allowance.due(view.node, self._turn, planned.work(own), work)

    def _tell_steps(self, ended: float) -> None:
        metrics: dict[str, Any] = {"steps": self._steps}
        if self._steps and not self._instruments.preset.brief:
            metrics["time.step"] = (ended - self._began) / self._steps
        self.results.take(metrics)
        if self._differences and self._steps:
            self._difference(self._steps - 1)

    def _tell_unfrozen(self) -> None:
        """Report layers that began to train after the scope was opened, and so are not measured in this round."""
        names = [name for name, parameter in self._view.frozen if parameter.requires_grad]
        if names:
            shown = ", ".join(names[:UNFROZEN_SHOWN]) + (", ..." if len(names) > UNFROZEN_SHOWN else "")
            text = (
                f"{len(names)} layers were unfrozen inside the client's scope and are measured from its next round on: "
            )
            self.results.remarks.append(
                ("layers.unfrozen", f"{text}{shown}.", {"layers": names[:UNFROZEN_SHOWN], "count": len(names)})
            )

    # -- at each step -------------------------------------------------------------------------------------------------

    def _measure_timed(
        self, optimizer: Optimizer, owned: Sequence[Tensor | None], step: int, skipped: bool | Tensor
    ) -> None:
        clock, looked = self._clock, False
        try:
            looked = clock is not None and clock.due()
            if clock is not None and looked:
                clock.begin_step(time.perf_counter())
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the training
            looked = self._without_clock(error)
        self._measure(optimizer, owned, step, skipped)
        try:
            if clock is not None and looked:
                clock.measured(optimizer, skipped)
        except Exception as error:  # noqa: BLE001
            self._without_clock(error)

    def _without_clock(self, error: Exception) -> bool:
        clock, self._clock = self._clock, None
        if clock is not None:
            clock.remove()
        self._report(error, "timing a step")
        return False

    def _measure(self, optimizer: Optimizer, owned: Sequence[Tensor | None], step: int, skipped: bool | Tensor) -> None:
        """Measure before each optimiser step, on the thread that trains."""
        now = time.perf_counter()
        self._step_seconds, self._step_began = now - self._step_began, now
        try:
            view = self._view
            view.step, view.owned = step, owned
            if not self._steps:
                self._begin_training(optimizer)
            if self._differences and step == self._steps > 0:
                self._difference(step - 1)
            if step >= self._steps:
                self._steps = step + 1
            if skipped is not False:
                self._skipped = self._skipped + skipped
            if self._ranks is not None:
                self._ranks.step()
            if self._recorded is not None:
                self._record(optimizer, owned, step, *self._recorded)
            for index, planned in self._stepwise:
                if planned.when is always or planned.when(self._moment(index, step)):
                    self._rows[index].append((step, self._run(index, planned)))
            self._after_backward(owned, step)
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the training
            self._report(error, "measuring a step")
        self.cost += time.perf_counter() - now

    def _after_backward(self, owned: Sequence[Tensor | None], step: int) -> None:
        """Finish the hooks that watched this step's backward pass, which is over."""
        self._clip.before_step(owned)
        if self._losses is not None:
            self._losses.step()
        if self._prepared:
            self._take_prepared(step)

    def _record(
        self, optimizer: Optimizer, owned: Sequence[Tensor | None], step: int, index: int, planned: Planned
    ) -> None:
        """Record the nine sums of this step's gradients, for the optimiser's parameters."""
        started = time.perf_counter()
        if planned.when is not always and not planned.when(self._moment(index, step)):
            return
        known = self._recorders.get(id(owned))
        if known is None:
            known = self._recorders[id(owned)] = (owned, GradientRecorder(owned))
        known[1].record(step)
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            known[1].scale(scale)  # a fused optimiser holds gradients multiplied by a GradScaler's scale
        self._instruments.costs[index] += time.perf_counter() - started

    def _run(self, index: int, planned: Planned) -> Mapping[str, Any]:
        """Return the probe's measurements; empty if it failed, or has reported that it cannot measure such models."""
        started, kind = time.perf_counter(), (index, type(self._view.model))
        if kind in self._instruments.unsuited:
            return {}
        try:
            return self._run_foreign(planned) if self._instruments.foreign[index] else planned.probe(self._view)
        except Exception as error:  # noqa: BLE001 - a user's probe may do anything
            if isinstance(error, ConfigError):
                self._instruments.unsuited.add(kind)
            self._report(error, f"the probe '{planned.name}'")
            return {}
        finally:
            self._instruments.costs[index] += time.perf_counter() - started

    def _run_foreign(self, planned: Planned) -> Mapping[str, Any]:
        """Run a user's probe, which may draw random numbers, or return something invalid."""
        with samples.preserved_random_streams(None):
            measured: Any = planned.probe(self._view)
        if measured is not None and not isinstance(measured, Mapping):
            raise ConfigError(f"A probe returns numbers by name, {{'norm': 1.5}}; got {type(measured).__name__}.")
        return measured or {}

    def _take_prepared(self, step: int) -> None:
        for index, take in self._takes.items():
            self._rows[index].append((step, take()))
        self._takes.clear()
        self._arm(step + 1)

    def _arm(self, step: int) -> None:
        """Set the hooks of probes that measure the next step's forward pass, if their schedule allows it."""
        for index, planned, prepare in self._prepared:
            if planned.when(self._moment(index, step)):
                self._takes[index] = prepare(self._view, functools.partial(self._charge, index=index))

    def _charge(self, work: Callable[[], None], index: int) -> None:
        started = time.perf_counter()
        try:
            work()
        except Exception as error:  # noqa: BLE001 - runs inside the user's forward pass
            self._report(error, "a forward hook")
        spent = time.perf_counter() - started
        self._instruments.costs[index] += spent
        self.cost += spent

    def _moment(self, index: int, step: int) -> Moment:
        return Moment(self._view.round, self._view.node, step, self._step_seconds, self._instruments.costs[index])

    def _difference(self, step: int) -> None:
        """Record `weight.difference` of one iteration, before the next one.

        This makes a hook after the step unnecessary.
        """
        now = flatten(self._view.parameters)
        change = now if self._last is None else now - self._last.to(now.device)
        self.results.take({"weight.difference": float(change.sum(dtype=torch.float64))}, step)
        self.results.take({"weight.difference_absolute": float(change.abs().sum(dtype=torch.float64))}, step)
        self._last = now

    def _fit_before(self) -> None:
        try:
            metrics, self._batch = self._instruments.fit.before(self._view, self._turn)
        except ConfigError:
            self._view.data = None  # unreadable: reported once, and the other probes do without
            raise
        self.results.take(metrics)
        if not self._instruments.preset.brief:
            self._guarded("describing a client's data", self._report_data)
            self._tell_labels()

    # -- weights that are loaded inside the scope ---------------------------------------------------------------------

    def _loaded(self) -> None:
        """Handle loaded weights: before any training they are its start, later its result."""
        view, shared = self._view, self._instruments.global_parameters
        if self._steps or (isinstance(self._hooks, StepCounter) and self._hooks.steps):
            return
        untrained = all(p.grad is None for p in view.parameters)
        if untrained or (fits(shared, view.parameters) and equals(shared, view.parameters)):
            self._begin_again()

    def _begin_training(self, optimizer: Optimizer) -> None:
        """Read the optimiser's settings before the first step, and check where the training starts."""
        self._settings = optimizer_settings(optimizer)
        self._check_start()

    def _check_start(self) -> None:
        """Check whether the weights are still those copied when the scope opened."""
        if not self._sharded and self._snapshot.is_outdated():
            self._guarded("looking at replaced weights", self._begin_again)

    def _begin_again(self) -> None:
        """Restart from weights replaced inside the scope: from the global model if it fits, else as they are now."""
        view, shared = self._view, self._instruments.global_parameters
        known = fits(shared, view.parameters)
        same = equals(shared, view.parameters) if known else False
        base = shared if known and not same else None
        self._snapshot.release()
        view.snapshot = self._snapshot = ParameterSnapshot(view.parameters, self._instruments.snapshot_buffers, base)
        self._last = self._snapshot.vector if self._differences else None
        if self._batch is not None:
            self.results.metrics = [own for own in self.results.metrics if not own[0].startswith("fit.")]
            self.results.take(self._instruments.fit.before_on(view, self._batch))
        remark = REPLACED_BY_OTHERS if known else REPLACED
        if same is False and remark not in self._instruments.remarked_bases:
            self._instruments.remarked_bases.add(remark)
            self.results.remarks.append(("update.base", remark, {"global_model": known}))

    def _tell_labels(self) -> None:
        """Report the client's labels when first seen, and again when they change.

        They are checked whenever the data changed, and every few rounds.
        """
        due = self._data_changed or not (self._view.round or 0) % LABEL_ROUNDS
        if not due and self._view.node in self._instruments.labels:
            return
        labels = labels_of(self._view.data)
        if labels is None or labels == self._instruments.labels.get(self._view.node or ""):
            return
        self._instruments.labels[self._view.node or ""] = labels
        self.results.take({"label.entropy": label_entropy(labels)})
        self.results.remarks.append(labels_remark(labels))

    def _report_data(self) -> None:
        """Report a description of the client's data when first seen, and again when they change."""
        report = self._instruments.data.look(self._view.node or "", self._view.data)
        if report is not None:
            self._data_changed = True
            self.results.take(report[0])
            self.results.remarks.append(report[1])

    def _fit_after(self) -> None:
        assert self._batch is not None  # noqa: S101 - asked by the caller
        self.results.take(self._instruments.fit.after(self._view, self._batch))

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the training
            self._report(error, what)


def _report_losses(report: Report, error: Exception) -> None:
    report(error, "training losses")
