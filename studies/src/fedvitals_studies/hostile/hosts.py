# SPDX-License-Identifier: Apache-2.0
"""The hosts that hostile messages are sent to: each opens rounds, passes messages through its real path, and closes.

with PlainHost() as host:
    host.begin(0)
    host.send("c1", payload)
    host.end(0)
"""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from torch import nn

import fedvitals as fv
from fedvitals.errors import FedvitalsError, RecordError
from fedvitals.hosts.flower.reply_envelope import KEY, ReplyEnvelope, run_name
from fedvitals.hosts.flower.server_rounds import ServerRounds
from fedvitals.hosts.otlp.receiver import PROTOBUF, Receiver
from fedvitals.hosts.otlp.tokens import sender_token
from fedvitals.measurements import single_records
from fedvitals.protocols import Sink
from fedvitals.records import Event, Metric, Record
from fedvitals.sinks.otel.sink import OpenTelemetry
from fedvitals.transport.sender import Sender
from fedvitals.transport.sender_limits import ROUND_REFUSALS
from fedvitals.transport.wire.payload import decode
from fedvitals_studies.flower.process_identity import flower_run
from fedvitals_studies.hostile.federation import is_own_error

SECRET = "the-secret-of-a-study"  # noqa: S105 - for a receiver that only this process reaches
FLOWER_RUN = 7


class CountingSink(Sink):
    """Counts by node the refused messages and arrived losses, and keeps the monitor's own errors."""

    name = "counting"

    def __init__(self) -> None:
        self.refusals: Counter[str | None] = Counter()
        self.losses: Counter[str | None] = Counter()
        self.errors: list[str] = []

    def write(self, records: Sequence[Record], /) -> None:
        for record in records:
            if isinstance(record, Metric) and record.name == "loss" and record.where.layer is None:
                self.losses[record.where.node] += 1
            elif isinstance(record, Event) and record.name == "telemetry.refused":
                self.refusals[record.where.node] += int(record.data.get("messages", 1))
            elif is_own_error(record):
                self.errors.append(record.message)


class AttackedHost(Protocol):
    """A server with a monitor in memory, the standard detectors and a model of two layers.

    `run`: what its clients call the run.
    """

    name: ClassVar[str]
    monitor: fv.Monitor
    run: str
    sink: CountingSink
    model: nn.Module
    _exit: contextlib.ExitStack

    def __init__(self) -> None:
        self.sink = CountingSink()
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.monitor = self._exit.enter_context(fv.Monitor(None, sinks=[self.sink], machine=False, privacy=3))
        self.run = self.monitor.run.id
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def begin(self, number: int) -> None:
        """Open a round."""
        self.monitor.host.round_begin(number, self.model)

    def send(self, node: str, message: bytes, envelope: dict[str, float] | None = None) -> None:
        """Pass on a message as one of this client's; `envelope`: times that a reply is to claim."""
        ...

    def reads(self, node: str) -> bool:
        """Return whether further messages of this client are read in this round: not after ten that were refused."""
        use = self.monitor.host.monitored.arrivals._quotas._uses.get(node)  # noqa: SLF001 - nobody else needs it
        return use is None or use.refusals < ROUND_REFUSALS

    def end(self, number: int) -> None:
        """Close the round."""
        self.monitor.host.round_end(number, self.model)


class PlainHost(AttackedHost):
    """A loop with its own transport: `absorb`."""

    name: ClassVar[str] = "plain loop"

    def send(self, node: str, message: bytes, envelope: dict[str, float] | None = None) -> None:  # noqa: ARG002
        self.monitor.host.absorb(message, Sender(node, self.run))


class FlowerHost(AttackedHost):
    """A Flower server without its network: messages are sent and replies received as the grid does."""

    name: ClassVar[str] = "Flower's replies"

    def __enter__(self) -> Self:
        super().__enter__()
        self._exit.enter_context(flower_run(FLOWER_RUN))
        self.rounds, self.run = ServerRounds(self.monitor), run_name(FLOWER_RUN)
        return self

    def begin(self, number: int) -> None:
        self.rounds.begin(number + 1)
        self._config = ConfigRecord({"server-round": number + 1})

    def send(self, node: str, message: bytes, envelope: dict[str, float] | None = None) -> None:
        request = Message(RecordDict({"config": self._config}), message_type="train", dst_node_id=int(node))
        now, key = time.time(), str(uuid.uuid4())
        request.metadata.__dict__.update(_message_id=key, _run_id=FLOWER_RUN)
        self.rounds.messages_sent([request], [key], now)
        times = {"received": now, "replied": now, "started": now - 1, "cpu": 0.0, **(envelope or {})}
        content: dict[str, Any] = {
            KEY: ReplyEnvelope(message, **times).record(),
            "metrics": MetricRecord({"num-examples": 20}),
        }
        reply = Message(RecordDict(content), reply_to=request)
        reply.metadata.__dict__["_message_id"] = str(uuid.uuid4())
        self.rounds.reply_received(reply, time.time())

    def end(self, number: int) -> None:  # noqa: ARG002 - the open one
        self.rounds.end()


class OtlpHost(AttackedHost):
    """A loop with an OTLP receiver, accessed over HTTP with each sender's own token.

    A payload's records are sent as OTLP messages; bytes that are no payload are sent as they are.
    """

    name: ClassVar[str] = "OTLP over HTTP"

    def __enter__(self) -> Self:
        super().__enter__()
        self.receiver = self._exit.enter_context(Receiver(self.monitor.host.admit, {self.run}, secret=SECRET, port=0))
        return self

    def send(self, node: str, message: bytes, envelope: dict[str, float] | None = None) -> None:  # noqa: ARG002
        headers = {"Authorization": f"Bearer {sender_token(SECRET, node)}"}
        try:
            records = [r for r in single_records(decode(message)) if isinstance(r, Metric | Event)]
        except RecordError:
            self._post(message, {**headers, "Content-Type": PROTOBUF})
            return
        try:
            OpenTelemetry(self.receiver.endpoint, headers).write(records)
        except FedvitalsError as error:
            _check_is_refusal(error)

    def _post(self, body: bytes, headers: dict[str, str]) -> None:
        request = urllib.request.Request(f"{self.receiver.endpoint}/v1/metrics", body, headers)  # noqa: S310
        try:
            urllib.request.urlopen(request, timeout=30).close()  # noqa: S310 - ours
        except urllib.error.HTTPError as error:
            error.close()
            if error.code >= 500:
                raise


def _check_is_refusal(error: Exception) -> None:
    if " 50" in str(error):
        raise error
