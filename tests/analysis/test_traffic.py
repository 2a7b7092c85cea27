# SPDX-License-Identifier: Apache-2.0
"""Traffic, against runs of which every byte and second is known by hand."""

import math

import pytest

from fedvitals.analysis import traffic
from fedvitals.records import Event, Transfer, Where, is_client
from support.timed_run import BYTES, TABLE, begin


def sent(sender, receiver, size=100, raw=None, seconds=None, kind="update", number=0):
    return Transfer(Where("r", number), 0.0, sender, receiver, size, size if raw is None else raw, seconds, kind)


def warning(name, node, number):
    return Event(Where("r", number, node), 0.0, "warning", name, "")


def of(told_run):
    transfers = [one for one in told_run.records if isinstance(one, Transfer)]
    events = [one for one in told_run.records if isinstance(one, Event)]
    return traffic.traffic_of(transfers, events, {}, told_run.run.tables, told_run.run.topology)


def test_bytes_by_client_and_round():
    """Up and down, on the wire and before compression, with the bandwidth that follows from the times."""
    run = begin()
    for _ in range(3):
        run.round({"c0": (1.0, 2.0, 4.0), "c1": (2.0, 1.0, 1.0)}, sent={"c0": BYTES // 4})
    found = of(run)
    by_name = {one.node: one for one in found.clients}
    assert (by_name["c0"].up.bytes, by_name["c0"].up.raw_bytes) == (3 * BYTES // 4, 3 * BYTES)
    assert by_name["c0"].up.compression == 4
    assert by_name["c0"].up.bits_per_second == 8 * (BYTES // 4) / 4.0
    assert by_name["c1"].down.bits_per_second == 8 * BYTES / 2.0
    assert [one.up.bytes for one in found.rounds] == [BYTES + BYTES // 4] * 3
    assert found.bytes == 3 * (3 * BYTES + BYTES // 4)
    assert found.clients[0].node == "c1"  # who moved the most comes first


def test_layers_are_exact_before_compression_and_in_proportion_after():
    run = begin()
    run.round({"c0": (1.0, 1.0, 1.0)}, sent={"c0": BYTES // 2})
    head, conv = of(run).layers
    assert (head.layer, conv.layer) == ("head.weight", "conv.weight")
    assert (head.raw_up_bytes, conv.raw_up_bytes) == (4 * 300, 4 * 100)
    assert (head.up_bytes, conv.up_bytes) == (2 * 300, 2 * 100)
    assert traffic.layers_of((), traffic.Flow(), traffic.Flow()) == ()
    assert math.fsum(one.share for one in traffic.layers_of((TABLE,), traffic.Flow(), traffic.Flow())) == 1


def test_telemetry_is_counted_apart():
    found = traffic.traffic_of([sent("c0", "server", 900), sent("c0", "server", 100, kind="telemetry")])
    assert (found.up.bytes, found.telemetry_bytes, found.telemetry_share) == (900, 100, 0.1)
    assert found.clients[0].telemetry_bytes == 100


def test_a_message_twice_in_a_round_is_a_retry():
    """The same pair, kind and size; in the next round it is a message of its own."""
    messages = [sent("c0", "server"), sent("c0", "server"), sent("c1", "server"), sent("c0", "server", number=1)]
    found = traffic.traffic_of(messages)
    assert found.retries == 1
    assert [one.retries for one in found.rounds] == [1, 0]
    assert {one.node: one.retries for one in found.clients} == {"c0": 1, "c1": 0}


@pytest.mark.parametrize("topology", traffic.EXCHANGING)
def test_where_pairs_exchange_often_nobody_counts_retries(topology):
    found = traffic.traffic_of([sent("c0", "edge-0"), sent("c0", "edge-0")], topology=topology)
    assert found.retries is None
    assert found.clients[0].retries is None


def test_edges_and_servers_are_no_clients():
    """What they exchange is counted once, apart; a ring's clients send to each other."""
    found = traffic.traffic_of([sent("edge-0", "server", 7), sent("server", "edge-0", 5), sent("c0", "c1", 3)])
    assert found.between.bytes == 12
    assert (found.up.bytes, found.down.bytes) == (3, 3)
    assert {one.node for one in found.clients} == {"c0", "c1"}


def test_clients_may_be_called_edge_devices():
    found = traffic.traffic_of([sent("edge-device-1", "edge-0", 3), sent("ring-a", "server", 4)])
    assert {one.node: one.up.bytes for one in found.clients} == {"edge-device-1": 3, "ring-a": 4}
    assert [is_client(n) for n in ("c1", "edge-7b", "edge-7", "ring-12", "cluster-0", "server", None)] == [
        True, True, False, False, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("uint8", 1), ("float8_e4m3fn", 1), ("bfloat16", 2), ("complex128", 16), ("bool", 1), ("?", 4)],
)
def test_bytes_of_a_value_by_its_type(dtype, size):
    assert traffic.bytes_per_value(dtype) == size


def test_availability_and_failures_over_the_rounds():
    """Of several troubles in one round the worst counts; rounds in which a client was not asked do not."""
    attendance = {None: range(5), "c0": [0, 1], "server": [0]}
    events = [
        warning("client.dropped_out", "c0", 2), warning("update.late", "c0", 3), warning("update.lost", "c0", 3),
        warning("client.failed", "c1", 0), warning("exception", "c0", 1), warning("update.late", "edge-1", 0),
    ]  # fmt: skip
    clients = {one.node: one for one in traffic.traffic_of([], events, attendance).clients}
    assert clients["c0"].outcomes == {0: "answered", 1: "answered", 2: "away", 3: "lost"}
    assert clients["c0"].availability == 0.75
    assert clients["c0"].failure_rate == pytest.approx(1 / 3)
    assert clients["c1"].failure_rate == 1
    assert set(clients) == {"c0", "c1"}


@pytest.mark.parametrize("seconds", [None, 0.0, -1.0, math.nan, math.inf])
def test_times_that_cannot_be_true_give_no_bandwidth(seconds):
    found = traffic.traffic_of([sent("c0", "server", 100, seconds=seconds)])
    assert found.up.bytes == 100
    assert found.up.bits_per_second is None


def test_negative_bytes_count_as_none():
    assert traffic.traffic_of([sent("c0", "server", -5, raw=-7)]).up == traffic.Flow()


def test_what_it_took_to_reach_an_accuracy():
    """Everything spent up to the end of the first round that has it; else the best there was."""
    accuracy = {0: 0.5, 1: 0.81, 2: math.nan, 3: 0.92}
    spent = dict.fromkeys(range(4), 10)
    low, middle, high = traffic.accuracy_milestones(
        accuracy, seconds=dict.fromkeys(range(4), 2.0), virtual_seconds={}, bytes=spent
    )
    assert (low.round, low.rounds, low.seconds, low.virtual_seconds, low.bytes) == (1, 2, 4.0, None, 20)
    assert (middle.rounds, middle.seconds, middle.bytes) == (4, 8.0, 40)
    assert (high.round, high.seconds, high.best) == (None, None, 0.92)


def test_the_bandwidth_that_a_target_needs():
    """(bytes) / (target − its other parts); no bandwidth helps who computes longer than that."""
    run = begin()
    run.round({"c0": (1.0, 2.0, 1.0), "c1": (1.0, 9.0, 1.0)})
    ways = {"c0": [{"download": 1.0, "compute": 2.0, "upload": 1.0, "wait": 7.0}],
            "c1": [{"download": 1.0, "compute": 9.0, "upload": 1.0, "wait": 0.0}]}  # fmt: skip
    c1, c0 = traffic.bandwidth_needs(ways, of(run), target_seconds=3.5, server_seconds=0.5)
    assert (c1.node, c1.bits_per_second) == ("c1", None)
    assert c0.bits_per_second == 8 * 2 * BYTES / 1.0
    assert c0.now_bits_per_second == 8 * 2 * BYTES / 2.0


def test_a_client_that_never_came_home_is_lost():
    """It was handed the model and nothing of it came; whose telemetry alone is missing has answered."""
    transfers = [sent("server", "c0", kind="model"), sent("server", "c1", kind="model"), sent("c1", "server")]
    events = [warning("worker.lost", node, 0) for node in ("c0", "c1", "c2", "c3")] + [
        warning("client.failed", "c3", 0)
    ]
    found = traffic.traffic_of(transfers, events, {None: [0], "c2": [0]})
    outcomes = {one.node: one.outcomes[0] for one in found.clients}
    assert outcomes == {"c0": "lost", "c1": "answered", "c2": "answered", "c3": "failed"}
    assert found.rounds[0].troubles == {"lost": 1, "failed": 1}


def test_bytes_of_a_round_do_not_depend_on_how_many_came_in_time():
    messages = [
        m
        for n in range(10)
        for m in (sent("server", "c0", 60, number=n, kind="model"), sent("c0", "server", 40, number=n))
    ]
    late = traffic.traffic_of(messages, [warning("update.late", "c0", n) for n in range(9)])
    (one,) = traffic.bandwidth_needs({"c0": [{"download": 1.0, "compute": 1.0, "upload": 1.0}]}, late, 2.0, 0.0)
    assert (one.bytes, one.bits_per_second) == (100, 800)


def test_no_bandwidth_shortens_latency():
    found = traffic.traffic_of([sent("server", "c0", 60, kind="model"), sent("c0", "server", 40)])
    ways = {"c0": [{"download": 1.0, "compute": 1.0, "upload": 1.0}]}
    (enough,) = traffic.bandwidth_needs(ways, found, 2.5, 0.0, {"c0": 0.5})
    assert (enough.bits_per_second, enough.now_bits_per_second) == (8 * 100 / 0.5, 8 * 100 / 1.0)
    (never,) = traffic.bandwidth_needs(ways, found, 1.9, 0.0, {"c0": 0.5})
    assert (never.bits_per_second, never.latency_seconds) == (None, 1.0)
