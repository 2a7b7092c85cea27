# SPDX-License-Identifier: Apache-2.0
"""One Flower node whose replies carry too much, or numbers under names that are the server's."""

import os
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedvitals.hosts.flower import replies
from fedvitals.hosts.flower.server_rounds import ServerRounds
from fedvitals.hosts.telemetry_budget import SMALLEST_BUDGET
from fedvitals.measurements import stamped
from fedvitals.records import Finding, Metric, Where
from fedvitals.transport.wire.payload import encode
from support.flower.federation import federate, rewritten, watched, with_mod

LIAR, ROUNDS = "101", 4
HERE = Where("flower-7", None, LIAR)


def attacked(records_of, **settings):
    """A run in which one node sends a payload of these records in each round, in place of its own."""
    rounds = iter(range(100))

    def change(record):
        number = next(rounds)
        own = [stamped(r, f"lies-{number}", i) for i, r in enumerate(records_of(number))]
        return ConfigRecord({**record, "payload": encode(own)})

    with watched(detectors="standard", **settings) as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, nodes=6, rounds=ROUNDS, fate=rewritten(change, node=LIAR))
    assert [m.where.round for m in sink.metrics("time.round")] == [1, 2, 3, 4]
    assert {f.where.node for f in sink.of(Finding)} <= {None, LIAR}
    return sink


def test_more_telemetry_than_a_reply_may_carry_is_refused():
    """32 KiB, or 1 % of a larger reply: the limit that clients keep to is the server's as well."""
    sink = attacked(lambda _: [Metric(HERE, 1.0, f"user.{os.urandom(6).hex()}", 1 / 3) for _ in range(4_000)])
    refused = sink.events("telemetry.refused")
    assert {(e.where.node, e.where.round) for e in refused} == {(LIAR, n) for n in range(1, ROUNDS + 1)}
    assert f"{SMALLEST_BUDGET:,} are its limit" in refused[0].message
    assert {f.where.node for f in sink.of(Finding, "TELEMETRY_LOST")} == {LIAR}


def test_new_names_in_each_round_do_not_grow_the_server():
    """Nine thousand names a round in 59 kB took the server 343 MB, and it reported a leak of its own."""
    sink = attacked(lambda number: [Metric(HERE, 1.0, f"user.{number:x}{i:x}", 1.0) for i in range(4_500)])
    assert len({m.name for m in sink.metrics(node=LIAR) if m.name.startswith("user.")}) < 220
    assert not sink.of(Finding, "MEMORY_LEAK")
    assert {e.where.node for e in sink.events("telemetry.refused")} == {LIAR}


SERVERS = ("time.clock_error", "time.client_virtual", "time.round_virtual", "update.staleness", "time.cpu", "time.wait")


def test_metrics_of_a_reply_that_have_a_meaning_here_are_the_clients_own():
    """Under these names a host reports what it measures; a client's MetricRecord may hold any."""
    with watched() as (monitor, sink):
        server_rounds = ServerRounds(monitor)
        server_rounds.begin(1)
        metrics = MetricRecord({**dict.fromkeys(SERVERS, 1e300), "accuracy": 0.5, "x" * 10_000: 1.0})
        reply = SimpleNamespace(content=RecordDict({"metrics": metrics}))
        replies._log_metrics(server_rounds, SimpleNamespace(node=LIAR, phase="train"), reply)
        server_rounds.end()
    of_liar = {m.name: m.value for m in sink.metrics(node=LIAR)}
    assert of_liar["accuracy"] == 0.5
    assert not {*of_liar} & {*SERVERS}
    assert {f"user.{name}" for name in SERVERS} <= {*of_liar}
    assert max(map(len, of_liar)) <= 200
    assert [e.where.node for e in sink.events("telemetry.refused")] == [LIAR]


@pytest.mark.parametrize("changes", [{"received": 1e11, "replied": 1e11}, {"started": 1e300}, {"cpu": 1e12}])
def test_times_that_no_clock_shows_are_refused(changes):
    fate = rewritten(lambda record: ConfigRecord({**record, **changes}), node=LIAR)
    with watched(detectors="standard") as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, nodes=6, rounds=2, fate=fate)
    assert [(e.where.node, e.where.round) for e in sink.events("telemetry.refused")] == [(LIAR, 1), (LIAR, 2)]
    assert not sink.of(Finding, "CLOCK_SKEW")
