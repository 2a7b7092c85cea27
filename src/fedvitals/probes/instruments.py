# SPDX-License-Identifier: Apache-2.0
"""The instruments of a run that measures PyTorch models: the state between its client-rounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedvitals.kernels import is_sharded
from fedvitals.model_hooks import named_members
from fedvitals.probes.activations import activations, watched_modules
from fedvitals.probes.adapters.pairs import describe_trained
from fedvitals.probes.adapters.watch import AdapterWatch
from fedvitals.probes.allowance import Allowance, Turns
from fedvitals.probes.data_watch import DataWatch
from fedvitals.probes.fit import Fit
from fedvitals.probes.host_copies import HostCopies
from fedvitals.probes.nonlinearity import nonlinearity
from fedvitals.probes.presets import Preset
from fedvitals.probes.results import Results
from fedvitals.probes.scale import scale
from fedvitals.probes.snapshot import InitialModel, shards_of, sketch_of
from fedvitals.probes.updates import UpdateTracker
from fedvitals.probes.view import View, flatten, table_of
from fedvitals.probes.weights import check_initialisation, fades_everywhere, starts_at_zero, weight_rows, whole_model
from fedvitals.protocols import PreparedProbe
from fedvitals.records import LayerTable


class Instruments:
    """The state that a run keeps between its client-rounds: preset, allowances, updates, and what it has learnt."""

    def __init__(self, preset: Preset, update_memory: int, *, compares_updates: bool = True) -> None:
        """`update_memory` is in bytes. A worker process does not compare updates: the server's process does."""
        self.preset = preset
        self.fit = Fit(preset.fit_percent, preset.fit_floor_rounds)
        self.turns = Turns(preset)
        self.updates = UpdateTracker(brief=preset.brief, memory=update_memory)
        self.adapters = AdapterWatch()
        self.compares_updates, self._update_memory = compares_updates, update_memory
        self.watches_modules = any(planned.probe is activations for planned in preset.probes)
        self.costs = [0.0] * len(preset.probes)
        # A user's probes may draw random numbers; ours promise not to.
        modules = [inspect.getmodule(planned.probe) for planned in preset.probes]
        self.foreign = [module is None or not module.__name__.startswith("fedvitals.") for module in modules]
        # Once and not for each client, since `isinstance` of a protocol takes as long as a small tensor operation.
        probes = [planned.probe for planned in preset.probes]
        self.prepares = [probe.prepare if isinstance(probe, PreparedProbe) else None for probe in probes]
        self.allowances = [Allowance(planned.percent, planned.floor_rounds) for planned in preset.probes]
        self.wants_inputs = any(isinstance(planned.probe, scale | nonlinearity) for planned in preset.probes)
        self.clipping_seen = False
        self.global_parameters: Sequence[Tensor] = ()  # of the open round's global model, if known
        self.remarked_bases: set[str] = set()  # remarks made about updates with another base, each once
        self.initial: Tensor | None = None  # the initial model in one vector; empty if it is too large to keep
        self._initial_sketch: tuple[int, Tensor | None] = (0, None)
        self.trained: frozenset[str] = frozenset()  # names of the parameters that train in any model seen so far
        self.unsuited: set[tuple[int, type]] = set()  # probes, by index, and models that they cannot measure
        self.unsuited_losses: set[tuple[str, type]] = set()  # clients and models whose training losses are unknown
        self.snapshot_buffers: list[Tensor] = []
        self.data = DataWatch()
        self.labels: dict[str, Mapping[int, int]] = {}  # each client's label histogram, as last reported
        self.norms: dict[str, float] = {}  # each client's mean gradient norm, one round ago
        self._tables: dict[Any, LayerTable] = {}

    def view(self, model: nn.Module, **about: Any) -> View:
        """Return a view of the layers of a model that train in it or in any model of this run seen so far."""
        view = View(model, trained=self.trained, **about)
        self.trained |= {name for name, parameter in view.named_parameters if parameter.requires_grad}
        return view

    def parameters(self, model: nn.Module) -> list[Tensor]:
        """Return the measured parameters of a global model."""
        return self.view(model).parameters

    def tables(self, model: nn.Module) -> list[Mapping[str, LayerTable]]:
        """Return the tables of the layers that train, and of all layers: clients may send the whole model, frozen
        parts included.
        """
        return self._tables_of(self.view(model))

    def _tables_of(self, view: View) -> list[Mapping[str, LayerTable]]:
        whole = (
            [{"parameter": self.table("parameter", named_members(view.model, "_parameters"))}] if view.frozen else []
        )
        return [*whole, tables_of(self, view)]

    def first_model(self, model: nn.Module) -> list[tuple[str, str, bool]]:
        """Keep the initial model, from which drift is measured; returns its problems as (layer, remark, everywhere).

        `everywhere`: all of its matrices begin far too small.
        """
        parameters = shards_of(self.view(model).parameters)
        length = sum(p.numel() for p in parameters)
        if 2 * 4 * length > self._update_memory:
            self.initial = torch.zeros(0)
            self._initial_sketch = length, None if self.preset.brief else sketch_of(parameters)
        else:
            self.initial = flatten(parameters)
        remarks = check_initialisation(model)
        everywhere = bool(remarks) and fades_everywhere(model)
        return [(layer, remark, everywhere) for layer, remark in remarks]

    @property
    def initial_model(self) -> InitialModel | None:
        """The model that drift is measured from, if there is one."""
        if self.initial is None:
            return None
        if len(self.initial):
            return InitialModel(len(self.initial), self.initial)
        return InitialModel(self._initial_sketch[0], None, self._initial_sketch[1])

    def begin_adapters(self, model: nn.Module) -> Mapping[str, LayerTable]:
        """Record the adapters of the model that a round begins with; returns their table, if there are any."""
        view = self.view(model)
        return self.adapters.begin_round(model, view.named_parameters, view.frozen)

    def trained_parts(self, model: nn.Module) -> tuple[str, int] | None:
        """Return a sentence on what trains of a model that is partly frozen, and the number of its low-rank adapters;
        None of any other.
        """
        view = self.view(model)
        names = [name for name, _ in view.named_parameters]
        pairs = self.adapters.pairs_of(view.named_parameters, view.frozen)
        frozen = [(name, tuple(p.shape)) for name, p in view.frozen]
        return (describe_trained(names, frozen, pairs), len(pairs)) if frozen else None

    def zero_layers(self, model: nn.Module) -> list[str]:
        """Return the matrices that start at 0 on purpose."""
        return starts_at_zero(model)

    def measure_model(self, model: nn.Module) -> tuple[list[Mapping[str, LayerTable]], Callable[[], Results]]:
        """Begin to measure the global model's own weights and buffers.

        Returns its layer tables (see `tables`), and a function that waits for the results.
        """
        view = self.view(model)
        self.adapters.end_round(model, view.named_parameters)
        measured = {} if is_sharded(view.parameters) else weight_rows(view)  # of shards, a process only has its own
        copies = HostCopies([*measured.values()])

        def results() -> Results:
            own = Results()
            for family, rows in zip(measured, copies.arrays(), strict=True):
                own.matrices.append((family, rows, None))
                if family == "weight":
                    own.take(whole_model(rows))
            return own

        return self._tables_of(view), results

    def remarks(self) -> list[tuple[str, str, Mapping[str, Any]]]:
        """Return what a round should report about the instruments themselves."""
        return []

    def table(self, rows: str, tensors: Sequence[tuple[str, Tensor]]) -> LayerTable:
        key = (rows, *((name, t.shape, t.dtype) for name, t in tensors))
        if key not in self._tables:
            self._tables[key] = table_of(rows, tensors)
        return self._tables[key]


def tables_of(instruments: Instruments, view: View) -> dict[str, LayerTable]:
    """Return the layer tables of a model: parameters, all of them as one, buffers, and the watched modules."""
    weights, dtype = sum(p.numel() for p in view.parameters), view.parameters[0].dtype if view.parameters else None
    whole = torch.empty(weights, dtype=dtype, device="meta")
    tables = {
        "parameter": instruments.table("parameter", view.named_parameters),
        "model": instruments.table("model", [("model", whole)]),
    }
    buffers = view.named_buffers
    if buffers:
        tables["buffer"] = instruments.table("buffer", buffers)
    if instruments.watches_modules:
        modules = [(name, torch.empty(0)) for name, _ in watched_modules(view.model)]
        tables["module"] = instruments.table("module", modules)
    return tables
