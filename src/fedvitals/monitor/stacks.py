# SPDX-License-Identifier: Apache-2.0
"""Clients that train as one batch in this process: one scope, one session and one block of results for all of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvitals.measurements import Measurements
from fedvitals.monitor.spine import Spine
from fedvitals.probes.node_columns import NodeColumns
from fedvitals.protocols import Node
from fedvitals.records import Span, Where, group_name
from fedvitals.resources.memory import resident_bytes
from fedvitals.scope import Scope
from fedvitals.stack import Stack
from fedvitals.time_parts import CLIENT, edge_span
from fedvitals.transport.timing import new_span_id

if TYPE_CHECKING:
    from torch import Tensor

    from fedvitals.probes.instruments import Instruments
    from fedvitals.probes.stacked.fit import StackFit
    from fedvitals.probes.stacked.session import StackSession
    from fedvitals.resources.client_memory import ClientMemory


@dataclass(slots=True)
class OpenStack:
    """Clients that train as one batch: one time span and one session for all of them."""

    stack: Stack
    scope: Scope
    token: Token[Scope | None]
    session: StackSession | None = None
    device: Any = None  # the CUDA device, if they train on one and memory is watched
    tables: Mapping[str, str] = field(default_factory=dict)
    logged: set[tuple[Node, str]] = field(default_factory=set)
    at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.perf_counter)


class Stacks:
    """Opens, measures and closes a stack; `open` is the open stack.

    `kit` and `memory` are created when first needed, since they import torch. The other parameters are those of
    `Clients`.
    """

    def __init__(
        self,
        spine: Spine,
        kit: Callable[[], Any],
        memory: Callable[[], ClientMemory],
        sent: Callable[..., Any],
        joined: Callable[[Sequence[Span], Measurements], None],
        *,
        profile: bool,
    ) -> None:
        self._scopes, self._emission, self._guard = spine.scopes, spine.emission, spine.guard
        self._kit_of_run, self._memory, self._sent, self._joined = kit, memory, sent, joined
        self._profile = profile
        self._told_unmeasured = False
        self.open: OpenStack | None = None

    @property
    def _kit(self) -> Instruments:
        kit: Instruments = self._kit_of_run()
        return kit

    @functools.cached_property
    def _fit(self) -> StackFit:
        from fedvitals.probes.stacked.fit import StackFit  # noqa: PLC0415 - imports torch

        preset = self._kit.preset
        return StackFit(preset.fit_percent, preset.fit_floor_rounds)

    def since(self) -> dict[Node, float]:
        """Return when the clients of the open stack began, by client; empty if no stack is open."""
        opened = self.open
        return {} if opened is None else dict.fromkeys(opened.stack.nodes, opened.at)

    def at(self, node: Node) -> Scope | None:
        """Return the scope of a client of the open stack; None for any other node."""
        if self.open is None or node not in self.open.stack.nodes:
            return None
        group = self.open.stack.groups[self.open.stack.nodes.index(node)]
        return replace(self.open.scope, node=node, group=group)

    def begin(self, stack: Stack, inside: Scope | None) -> None:
        """Open a stack inside a scope, or inside the caller's."""
        stack = self._guard("naming a stack of clients", lambda: self._with_names(stack)) or stack

        def begin() -> None:
            if self.open is not None:
                text = f"A stack of {len(self.open.stack.nodes)} clients was still open."
                self._emission.record.event(self.open.scope, "warning", "stack.unclosed", text)
                self.end({})
            # As a client: records made in here without a node come from the code of clients.
            opened = self.open = OpenStack(stack, *self._scopes.enter(None, client=True, inside=inside))
            self._tell_unmeasured(opened.scope)
            self._guard("watching a stack of clients", lambda: self._watch(opened), opened.scope)

        self._guard("opening a stack of clients", begin)

    def _watch(self, opened: OpenStack) -> None:
        from fedvitals.probes.instruments import tables_of  # noqa: PLC0415 - imports torch
        from fedvitals.probes.stacked.session import StackSession  # noqa: PLC0415
        from fedvitals.probes.view import View  # noqa: PLC0415

        stack = opened.stack
        if not self._kit.preset.brief:
            tables = tables_of(self._kit, View(stack.module))
            self._emission.layer_tables(tables)
            opened.tables = {rows: table.digest for rows, table in tables.items()}
        report = functools.partial(self._guard.report, scope=opened.scope)
        opened.device = self._memory().begin_stack(stack.states) if self._profile else None
        opened.session = StackSession(self._kit, self._fit, stack, opened.scope.round, report)

    def step(self, step: int, gradients: Tensor) -> None:
        """Measure before an optimiser step."""
        if self.open is not None and self.open.session is not None:
            self.open.session.step(step, gradients)

    def end(self, failed: Mapping[Any, BaseException]) -> None:
        """Close the open stack, if any; `failed`: the clients that did not train to the end, and why."""
        opened, self.open = self.open, None
        if opened is None:
            return
        try:
            self._guard("closing a stack of clients", lambda: self._finish(opened, failed), opened.scope)
        finally:
            self._scopes.leave(opened.scope, opened.token)

    def abandon(self) -> None:
        """Close the open stack without recording anything."""
        if self.open is not None:
            self._scopes.leave(self.open.scope, self.open.token)
        self.open = None

    def _finish(self, opened: OpenStack, failed: Mapping[Any, BaseException]) -> None:
        stack, errors = opened.stack, {self._scopes.client(node): error for node, error in failed.items()}
        columns, clients = NodeColumns([*zip(stack.nodes, stack.groups, strict=True)]), len(stack.nodes)
        silent = {*stack.silent}
        cost = 0.0
        if opened.session is not None:
            columns, updates, sums = opened.session.finish()
            started = time.perf_counter()
            for node, update, rows in zip(
                stack.nodes, updates.unbind(), [None] * clients if sums is None else sums, strict=True
            ):
                if node not in silent:
                    self._sent(node, update, rows)
            cost = opened.session.cost + time.perf_counter() - started
            columns.put("monitor.cost", cost / clients)
        columns.use_tables(opened.tables)
        resident = resident_bytes()
        memory = self._memory().end_stack(opened.device, clients)
        if resident is not None:
            memory["memory.resident"] = resident
        self.tell_growth(opened.scope, resident)
        seconds = time.perf_counter() - opened.began
        for name, measure in {"time.client": seconds / clients, **memory}.items():
            columns.put(name, measure)
        fit = columns.values_of("fit.loss_after")  # used as the loss of a client that logged none
        losses = {row: loss for row, loss in fit.items() if (stack.nodes[row], "loss") not in opened.logged}
        columns.put("loss", [*losses.values()], np.array([*losses], np.intp))
        without = [row for row, node in enumerate(stack.nodes) if node in silent]
        measured = self._emission.columns(opened.scope, columns, without)
        for node, error in errors.items():
            if node not in silent:
                self._guard.exception(self._scope_of(opened, node), "client.failed", error)
        spans = self._spans(opened, silent, errors, seconds, cost)
        self._emission.emit_all(spans)
        self._joined(spans, measured)

    @staticmethod
    def _scope_of(opened: OpenStack, node: Node) -> Scope:
        group = opened.stack.groups[opened.stack.nodes.index(node)]
        return replace(opened.scope, node=node, group=group)

    def _spans(
        self, opened: OpenStack, silent: set[Node], errors: Mapping[Node, BaseException], seconds: float, cost: float
    ) -> list[Span]:
        """Return the Spans of all clients except the silent ones; each trained for as long as the whole stack."""
        scope, stack = opened.scope, opened.stack
        parts = {"parts": {"compute": seconds - cost, "measure": cost}} if self._profile else {}
        attributes = [{"failed": failed, "stacked": len(stack.nodes), **parts} for failed in (False, True)]
        parents = {group: edge_span(scope.parent, group) for group in {*stack.groups} if group is not None}
        return [
            Span(
                Where(scope.run, scope.round, node, None, None, group),
                *(opened.at, CLIENT, seconds, scope.trace, new_span_id()),
                scope.parent if group is None else parents[group],
                attributes[node in errors],
            )
            for node, group in zip(stack.nodes, stack.groups, strict=True)
            if node not in silent
        ]

    def _tell_unmeasured(self, scope: Scope) -> None:
        """Report once which measurements of the preset are only made of clients that train alone."""
        from fedvitals.probes.stacked.session import unmeasured  # noqa: PLC0415 - imports torch

        names = () if self._told_unmeasured else unmeasured(self._kit)
        self._told_unmeasured = True
        if names:
            text = f"Not measured of clients that train as one batch: {', '.join(names)}."
            self._emission.record.event(scope, "info", "stack.unmeasured", text, {"probes": names})

    def tell_growth(self, scope: Scope, resident: float | None) -> None:
        """If the process grows, record which tensors accumulate: those of all clients here, not of a single one."""
        from fedvitals.resources.leaks import CENSUS  # noqa: PLC0415 - imports torch

        grown = self._memory().grown(scope.round, resident) if self._profile else None
        if grown is not None:
            self._emission.record.event(replace(scope, node=None, group=None), "info", CENSUS, *grown)

    def _with_names(self, stack: Stack) -> Stack:
        """Return the same stack with its nodes and groups as text."""
        nodes, silent = (tuple(map(self._scopes.client, names)) for names in (stack.nodes, stack.silent))
        return replace(stack, nodes=nodes, silent=silent, groups=tuple(map(group_name, stack.groups)))
