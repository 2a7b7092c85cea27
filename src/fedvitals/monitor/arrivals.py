# SPDX-License-Identifier: Apache-2.0
"""Accepts the payloads of clients that train in other processes or on other machines."""

from __future__ import annotations

import functools
import os
import pickle  # only to test whether a user's probe can be pickled; nothing is ever unpickled here
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedvitals.errors import ConfigError, RecordError
from fedvitals.measurements import Measurements, Telemetry, Transfers, places_of, single_records
from fedvitals.monitor.losses import LostRecords
from fedvitals.monitor.progress import TRAIN, Awaited
from fedvitals.monitor.repeated_descriptions import RepeatedDescriptions
from fedvitals.monitor.sender_results import column_values, first_values, gather, gather_rows, is_needed
from fedvitals.monitor.spine import Spine
from fedvitals.monitor.workers import INITIAL_BYTES, WorkerObserver
from fedvitals.probes.cohort import SENDER, WORKER, Cohort
from fedvitals.probes.presets import Planned, Preset
from fedvitals.probes.results import Key, Results, metric_of_nodes
from fedvitals.protocols import Node
from fedvitals.records import (
    AnyName,
    Event,
    LayerStats,
    Metric,
    Record,
    Run,
    Span,
    Transfer,
    Where,
)
from fedvitals.resources.capture import Capture
from fedvitals.resources.time_ledger import Ledger
from fedvitals.scope import Scope
from fedvitals.store.deliveries import Intervals, fresh
from fedvitals.time_parts import CLIENT, edge_span
from fedvitals.transport.payload_buffer import LOST, THINNED
from fedvitals.transport.payload_check import (
    BROKEN_RULES,
    GAPS_OF_SENDER,
    IMPOSSIBLE,
    MALFORMED,
    SOURCES,
    SOURCES_OF_SENDER,
    check_no_claim,
    described_records,
    is_claim,
    is_empty,
    is_possible,
    of_one_training,
    tables_of_payload,
)
from fedvitals.transport.privacy import released
from fedvitals.transport.sender import ForgedRecordError, Sender, as_seen, quoted
from fedvitals.transport.sender_limits import LeftOut, SenderQuotas, check_sources, entry_of_sender, name_of
from fedvitals.transport.sink_writer import SENDER as OF_SENDER
from fedvitals.transport.wire.payload import LIMITS, decode

if TYPE_CHECKING:
    from fedvitals.probes.backends import AnyInstruments

REFUSED = "telemetry.refused"  # the event that names a sender whose telemetry was rejected, in whole or in part


class Arrivals:
    """Decodes payloads, accepts each record once, adds clients to their round; reports clients that never arrived."""

    def __init__(
        self,
        spine: Spine,
        lost: LostRecords,
        kit: AnyInstruments,
        ledger: Ledger | None,
        capture: Capture | None = None,
    ) -> None:
        self._context, self._scopes = spine.context, spine.scopes
        self._emission, self._guard = spine.emission, spine.guard
        self._lost, self._kit, self._ledger = lost, kit, ledger
        self._lock = threading.Lock()
        self._capture = capture
        self._delivered: dict[tuple[str, str], Intervals] = {}  # from our own workers
        self._delivered_by_sender: dict[Node, dict[tuple[str, str], Intervals]] = {}
        self._quotas = SenderQuotas()
        self._held: dict[Node, list[Record]] = {}  # what senders in the open round claim about layers and updates
        self._expected: dict[Node, float] = {}  # and since when
        self._descriptions = RepeatedDescriptions()

    def observer(self) -> WorkerObserver:
        """Return an observer for a child process, with everything known at this point."""
        context, kit = self._context, self._kit
        here, initial = self._scopes.round, kit.initial
        if initial is not None:
            small = 0 < initial.nbytes <= INITIAL_BYTES and str(initial.dtype) == "torch.float32"
            initial = initial.cpu() if small else None
        return WorkerObserver(
            run=context.run.id,
            name=context.run.name,
            preset=self._sendable(kit.preset),
            policy=context.policy,
            strict=self._guard.strict,
            round=None if here is None else here.round,
            trace=context.trace,
            span=None if here is None else here.span,
            known=frozenset(context.own_tables),
            trained=kit.trained,
            initial=None if initial is None else initial.numpy().tobytes(),
            profile=self._ledger is not None,
            capture=self._capture,
            turn=kit.turns.hand_out(self._expected),
            monitor_process=os.getpid(),
        )

    def expect(self, nodes: Iterable[AnyName]) -> None:
        """Note clients whose payload should arrive in this round."""
        self._expected.update(dict.fromkeys(map(self._scopes.client, nodes), time.time()))

    def awaited(self) -> Awaited | None:
        """Return the clients whose payload should have arrived; None if there are none."""
        return Awaited(TRAIN, self._expected.copy()) if self._expected else None

    def take(self, payload: bytes, cohort: Cohort | None, sender: Sender | None = None) -> None:
        """Queue a payload's records under their own identity; add clients that finished to the open round's cohort."""
        if payload == b"":
            return
        with self._lock:  # the callbacks of a process pool run on a thread of their own
            left_out = LeftOut()
            new = self._read(payload, sender, left_out)
            if sender is not None:
                new = self._of_sender(of_one_training(new, left_out), sender, left_out)
                new = [r for r in new if not self._is_late_claim(r)]
            now = time.time()
            # Histories keep the newest value: a record dated in the future would displace everything measured here
            # later.
            new = [record if record.at <= now else replace(record, at=now) for record in new]
            new = self._descriptions.without_repeats(new)
            if sender is None or cohort is None:
                self._emission.admit(new)
            else:
                new = self._hold_claims(single_records(new), sender)
            self._join(new, cohort, sender)
            self._tell_size(new, len(payload))

    def take_records(self, records: Sequence[Record], sender: Sender, size: int) -> tuple[int, str]:
        """Admit records that a sender delivers by another route than a payload, in a message of `size` bytes.

        Returns how many were rejected, and why the first of them was; raises a RecordError if all were.
        """
        with self._lock:
            self._quotas.message_limits(sender.node, self._round, size, sender.budget)
            check_sources(sender.node, records)
            kept: list[Record] = []
            why = ""
            for record in records:
                try:
                    own = sender.own(record, self._context.run.id)
                    check_no_claim(own)
                    kept.append(own)
                except RecordError as error:
                    why = why or str(error)
            new = fresh(kept, self._delivered_by(sender))
            self._emission.admit(self._of_sender(new, sender, LeftOut()))
            self._forget_sources(sender)
        return len(records) - len(kept), why

    def within_names(self, node: Node, values: Mapping[str, float]) -> tuple[dict[str, float], str]:
        """Split metrics into those a sender may report and a reason why the others were left out.

        Accepts known names, and new ones while the sender may add some. The reason is empty if nothing was left out.
        """
        kept, left_out = dict(values), LeftOut()
        with self._lock:
            for name in values:
                limit = self._quotas.excess_name(node, name)
                if limit is not None:
                    left_out.add(
                        limit, Metric(Where(self._context.run.id, None, node), 0.0, name, kept.pop(name)), name
                    )
        return kept, self._reasons(left_out)

    def refuse(self, node: Node) -> bool:
        """Count a rejected message of a sender; return whether to report it now rather than at the end of the round."""
        with self._lock:
            return self._quotas.report(node, self._round, whole=True)

    @property
    def _round(self) -> int | None:
        return None if self._scopes.round is None else self._scopes.round.round

    def _delivered_by(self, sender: Sender | None) -> dict[tuple[str, str], Intervals]:
        if sender is None:
            return self._delivered
        return entry_of_sender(self._delivered_by_sender, sender.node, dict)

    def _forget_sources(self, sender: Sender | None) -> None:
        """Bound the memory of past deliveries. A sender that is forgotten can at most deliver its own records twice."""
        delivered = self._delivered_by(sender)
        while len(delivered) > (SOURCES if sender is None else SOURCES_OF_SENDER):
            delivered.pop(next(iter(delivered)))
        if sender is not None:
            for source in [s for s, intervals in delivered.items() if intervals.count > GAPS_OF_SENDER]:
                del delivered[source]

    def _is_late_claim(self, record: Record) -> bool:
        """Whether a record describes layers or an update of a closed round, where the server's own record stands."""
        of_round = None if isinstance(record, Run) else record.where.round
        return of_round not in (None, self._round) and (isinstance(record, LayerStats) or is_claim(record))

    def _hold_claims(self, records: list[Record], sender: Sender) -> list[Any]:
        """Admit a sender's records, but hold those on layers and its update back until the round ends.

        Returns the records without the held claims about its update.
        """
        held = [record for record in records if isinstance(record, LayerStats) or is_claim(record)]
        self._held.setdefault(sender.node, []).extend(held)
        self._emission.admit(r for r in records if not (isinstance(r, LayerStats) or is_claim(r)))
        return [record for record in records if not is_claim(record)]

    def _read(self, payload: bytes, sender: Sender | None, left_out: LeftOut) -> list[Any]:
        """Return a payload's new records, assigned to their round, and register its layer tables.

        For a sender, malformed records are added to `left_out`, and the others are accepted.
        """
        records: Sequence[Telemetry] = ()
        node, limits = None if sender is None else sender.node, LIMITS
        try:
            if sender is not None:
                limits = self._quotas.message_limits(sender.node, self._round, len(payload), sender.budget)
            records = decode(payload, limits)
            if sender is not None:  # a sender may lie, so each of its numbers is checked by itself
                check_sources(sender.node, records)
                own = self._own_records(sender, single_records(records), left_out)
                records, tables = described_records(own, self._context.tables, left_out)
            else:
                tables = tables_of_payload(records, self._context.run.id, self._context.tables)
            self._quotas.charge_tables(node, tables, self._context.tables, self._context.own_tables)
        except RecordError as error:
            nodes = dict.fromkeys(place.node for r in records for place in places_of(r) if place.node is not None)
            if sender is not None:
                raise
            self._lost.miss()
            if not nodes:
                raise
            raise RecordError(f"{error} Its records are of {', '.join(nodes)[:200]}.") from error
        self._emission.layer_tables(tables, own=sender is None)
        delivered = self._delivered_by(sender)
        new = [
            self._placed(r)
            for telemetry in fresh(records, delivered)
            for r in self._on_one_clock(telemetry)
            if not isinstance(r, Run) and not is_empty(r)
        ]
        self._forget_sources(sender)
        return new

    def _own_records(self, sender: Sender, records: Iterable[Record], left_out: LeftOut) -> list[Record]:
        """Return the records that a client can have measured on itself; ForgedRecordError if one is about another."""
        own: list[Record] = []
        for record in records:
            try:
                own.append(sender.own(record, self._context.run.id))
            except ForgedRecordError:
                raise
            except RecordError:
                left_out.add(MALFORMED, record, name_of(record))
        return own

    def _of_sender(self, records: Sequence[Any], sender: Sender, left_out: LeftOut) -> list[Any]:
        """Return the records within the sender's limit, dated no later than the server received them.

        `left_out` holds what was already left out of its message.
        """
        seen = None if self._ledger is None else self._ledger.seen(sender.node)
        seen = seen or (self._context.run.started, time.time())
        kept = []
        for record in self._quotas.admitted(sender.node, self._round, records, left_out):
            if is_possible(record):
                kept.append(record)
            else:
                left_out.add(IMPOSSIBLE, record, name_of(record))
        if left_out.total:
            self._report_left_out(sender.node, left_out, left_out.total + len(kept))
        source = f"{OF_SENDER}{sender.node}"  # the sender's own process names were needed above, and are not stored
        return [replace(as_seen(record, seen), source=source) for record in kept]

    def _report_left_out(self, node: Node, left_out: LeftOut, brought: int) -> None:
        """Record how many records of a message were left out and why; at a lower level if there were only too many."""
        amount = not any(reason in BROKEN_RULES for reason in left_out.counts)
        if self._quotas.report(node, self._round, whole=False, amount=amount):
            here = self._scopes.round or self._scopes.here()
            text = f"Of {brought:,} records of '{node}', these were left out: {self._reasons(left_out)}."
            level = "info" if amount else "warning"
            self._emission.record.event(replace(here, node=node), level, REFUSED, text, {"left_out": left_out.total})

    def _reasons(self, left_out: LeftOut) -> str:
        """Return the reasons as text, each with an example unless the privacy level forbids it."""
        reasons = []
        for reason, count in left_out.counts.items():
            record, name = left_out.examples[reason]
            shown = released(record, self._context.policy) is not None
            reasons.append(f"{count:,} {reason}" + (f", e.g. {quoted(name)}" if shown else ""))
        return "; ".join(reasons)

    def _tell_size(self, records: Sequence[Telemetry], size: int) -> None:
        """Record how many bytes of telemetry were added to each client's message."""
        own = (r for r in records if isinstance(r, Span) and r.name == CLIENT and r.where.node is not None)
        spans = {span.where.node or "": span for span in own}
        if self._ledger is None or not spans:
            return
        share, run = size // len(spans), self._context.run.id
        for round_index in dict.fromkeys(span.where.round for span in spans.values()):
            own_spans = [span for span in spans.values() if span.where.round == round_index]
            count, nodes = len(own_spans), [span.where.node or "" for span in own_spans]
            place = (run, round_index, nodes, [span.where.group for span in own_spans])
            ends = ([span.at + span.seconds for span in own_spans], nodes, ["server"] * count)
            sizes = [share] * count
            self._emission.emit(Transfers(*place, *ends, sizes, sizes, [None] * count, ["telemetry"] * count))

    def forget(self) -> None:
        """Clear the expected clients and the records that were held back."""
        self._expected, self._held = {}, {}

    def take_held(self) -> dict[Node, list[Record]]:
        """Return and clear what senders of the open round claim about layers and updates, by node.

        The end of the round decides what is admitted: where the server holds the update itself, only its own
        measurement counts; and layers get the names that most clients use.
        """
        with self._lock:
            held, self._held = self._held, {}
        return held

    def close_round(self, scope: Scope, cohort: Cohort) -> None:
        """Report each client that was sent out and did not return, as an event."""
        with self._lock:
            unreported = self._quotas.take_unreported()
        for (node, amount), count in unreported.items():
            what = "brought more than one client may" if amount else "were refused, whole or in part"
            text, level = f"{count} more messages of '{node}' {what} in this round.", "info" if amount else "warning"
            self._emission.record.event(replace(scope, node=node), level, REFUSED, text, {"messages": count})
        missing, self._expected = [*self._expected], {}
        for node in missing:
            self._guard("noting who is missing", functools.partial(self._tell_missing, scope, node, cohort), scope)

    def _tell_missing(self, scope: Scope, node: Node, cohort: Cohort) -> None:
        self._lost.miss()
        text = f"The worker of client '{node}' did not bring its records home."
        self._emission.record.event(replace(scope, node=node), "warning", LOST, text)
        if node not in cohort:
            cohort.add(node, None, Results(), failed=True)

    def _on_one_clock(self, telemetry: Telemetry) -> Iterable[Telemetry]:
        """Return the telemetry, split into single records if it covers several nodes whose clocks differ."""
        if (
            not isinstance(telemetry, Measurements)
            or self._ledger is None
            or not self._ledger.exchanged
            or not any(map(self._ledger.ahead, telemetry.nodes))
        ):
            return (telemetry,)
        return telemetry.records()

    def _placed(self, record: Telemetry) -> Telemetry:
        """Assign a record to the open round if the worker did not know its round."""
        here = self._scopes.round
        if isinstance(record, Measurements):
            return record if here is None or record.round is not None else replace(record, round=here.round)
        if self._ledger is not None and self._ledger.exchanged:
            record = _by_our_clock(record, self._ledger)
        if isinstance(record, Run) or here is None or record.where.round is not None:
            return record
        if isinstance(record, Span) and record.parent is None:
            group = record.where.group
            record = replace(record, parent=here.span if group is None else edge_span(here.span, group))
        return replace(record, where=replace(record.where, round=here.round))

    def _join(self, records: Sequence[Telemetry], cohort: Cohort | None, sender: Sender | None) -> None:
        """Add finished clients to the cohort, and keep the measurements of them that the next round needs."""
        spans = {
            record.where.node: record
            for record in records
            if isinstance(record, Span) and record.name == CLIENT and record.where.node is not None
        }
        blocks: list[Measurements] = []
        # For clients described by single records, as all are that come from a sender.
        single: dict[Node, Results] = {} if sender is None else {node: Results() for node in spans}
        for record in records:
            if isinstance(record, Measurements):
                blocks.append(record)
            elif isinstance(record, Event | Transfer):
                self._count(record, cohort)
            elif is_needed(record) and record.where.node in spans:
                gather(single.setdefault(record.where.node or "", Results()), record)
        for block in blocks if single else ():
            gather_rows(single, block)
        together = {node: span for node, span in spans.items() if node not in single}
        steps, norms = (
            {**first_values(single, name), **column_values(blocks, name)} for name in ("steps", "gradient.norm")
        )
        self._compare(spans, norms)
        scales = {**first_values(single, "adapter.scale"), **column_values(blocks, "adapter.scale")}
        self._kit.adapters.note_scales(scales)
        for node, span in spans.items():
            self._expected.pop(node, None)
            self._kit.turns.note(node, steps.get(node, -1.0))
            if self._ledger is not None:
                self._ledger.trained(span)
        if cohort is None:
            return
        cohort.add_measured(together, blocks, origin=WORKER)
        for node, results in single.items():
            self._join_single(cohort, spans[node], results, sender)

    def _count(self, record: Event | Transfer, cohort: Cohort | None) -> None:
        """Count a message, or records that one of our own workers reports as lost or left out."""
        if isinstance(record, Transfer):
            if cohort is not None:
                cohort.count_traffic((record.sender,), (record.receiver,), (record.bytes,))
        elif record.name == LOST and not record.data.get("claimed"):
            lost = record.data.get("records")
            self._lost.miss(lost if isinstance(lost, int) and 0 < lost < 1 << 40 else 1)
        elif record.name == THINNED and not record.data.get("claimed"):
            thinned = record.data.get("client_rounds")
            self._lost.thin(thinned if isinstance(thinned, int) and 0 < thinned < 1 << 40 else 1)

    def _join_single(self, cohort: Cohort, span: Span, results: Results, sender: Sender | None) -> None:
        kind = WORKER if sender is None else SENDER
        failed = bool(span.attributes.get("failed"))
        cohort.add(span.where.node or "", span.where.group, results, failed=failed, origin=kind)
        cost = sum(value for name, value, _ in results.metrics if name == "monitor.cost")
        # A sender's cost is believed up to its training time: one client cannot inflate the cost of the round.
        cohort.cost += cost if sender is None else min(cost, span.seconds) if cost > 0 else 0.0

    def _compare(self, spans: Mapping[Node, Span], norms: Mapping[Node, float]) -> None:
        """Record `gradient.change_round`; a worker cannot, as the client may have trained its last round elsewhere."""
        changes: dict[int | None, dict[Key, float]] = {}
        for node, span in spans.items():
            norm = norms.get(node)
            if norm is None:
                continue
            before, self._kit.norms[node] = self._kit.norms.get(node), norm
            if before:
                changes.setdefault(span.where.round, {})[node, span.where.group] = abs(norm - before) / before
        for round_index, by_key in changes.items():
            self._emission.emit(
                metric_of_nodes(self._context.run.id, round_index, time.time(), "gradient.change_round", by_key)
            )

    def _sendable(self, preset: Preset) -> Preset:
        """Return the preset without the user's own probes that cannot be pickled."""
        going = functools.partial(self._guard, "for_worker()")
        probes = tuple(planned for planned in preset.probes if going(functools.partial(_goes, planned)))
        return preset if len(probes) == len(preset.probes) else replace(preset, probes=probes)


def _by_our_clock(record: Record, ledger: Ledger) -> Record:
    """Return a record with its times on the server's clock, within the client's journey if the host reported one."""
    if isinstance(record, Run):
        return record
    node = record.where.node
    if isinstance(record, Span) and record.name == CLIENT and node is not None:
        journey = ledger.journey(node)
        record = record if journey is None else replace(record, parent=journey)
    ahead = ledger.ahead(node)
    return replace(record, at=record.at - ahead) if ahead else record


def _goes(planned: Planned) -> bool:
    try:
        pickle.dumps(planned)
    except Exception as error:
        raise ConfigError(
            f"The probe '{planned.name}' or its schedule cannot go to a worker process ({error}). "
            "Make it a function of a module; workers measure without it until then."
        ) from error
    return True
