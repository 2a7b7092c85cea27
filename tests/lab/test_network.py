# SPDX-License-Identifier: Apache-2.0
"""The virtual clock: journeys depend on (seed, round, node) alone, and every node's time in a round adds up."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvitals.errors import ConfigError
from fedvitals.lab.network.profiles import DEVICES, LINKS, Device, Link
from fedvitals.lab.network.round_timing import journey_parts, time_synchronous_round
from fedvitals.lab.network.virtual_clock import (
    EdgeTransfer,
    Journey,
    Network,
    aggregation_seconds,
    edge_transfer,
    plan_journey,
    profile_of,
    sending_seconds,
    to_ticks,
)
from support.conditions import holds_for_each

MIXED = Network(links={"4g": 0.5, "3g": 0.5}, devices={"phone": 0.8, "laptop": 0.2}, spread=0.5, jitter=0.3)


def trip(node="c0", download=0.0, compute=0.0, upload=0.0, **more):
    return Journey(node, download=download, compute=compute, upload=upload, **more)


@st.composite
def cohorts(draw):
    seconds = st.floats(0, 1e5)
    count = draw(st.integers(0, 8))
    return [
        trip(
            f"c{number}",
            *(draw(seconds) for _ in range(3)),
            available=draw(st.booleans()),
            lost=draw(st.booleans()),
            corrupted=draw(st.booleans()),
            queue=draw(seconds),
            data=draw(seconds),
            group=draw(st.sampled_from([None, "edge-0", "edge-1"])),
        )
        for number in range(count)
    ]


# Journeys.


def test_a_journey_by_hand():
    one = plan_journey(Network(links="3g", devices="phone"), "c0", 4, 200_000, 96_000, 5e9, seed=1)
    assert one == trip("c0", to_ticks(0.15 + 1.0), 0.5, to_ticks(0.15 + 1.0))
    assert one.total == one.ends == pytest.approx(2.8, abs=1e-5)


def test_each_message_pays_the_latency_and_lora_waits_for_its_turn():
    one = plan_journey(Network(links="4g"), "c0", 0, 9_000_000, 0, 0, seed=1, messages=20, began=100.0)
    assert one.download == pytest.approx(20 * 0.085 + 8, abs=1e-6)
    assert one.upload == pytest.approx(20 * 0.085, abs=1e-6)
    assert one.began == 100
    lora = plan_journey(Network(links="lora"), "c0", 0, 547, 5470, 0, seed=1)
    assert (lora.download, lora.upload) == (1 + 0.8 / 0.01, 1 + 8 / 0.01)


def test_a_device_reads_its_samples_and_a_slow_server_line_holds_up_who_is_quicker():
    own = {"desk": Device(1e9, 2**30, samples_per_second=50.0)}
    one = plan_journey(Network(devices="desk", profiles=own), "c0", 0, 0, 0, 0, seed=1, samples=160)
    assert one.data == to_ticks(3.2)
    assert one.total == one.download + one.data + one.upload
    slow = Network(links="4g", server_bits_per_second=1e6)
    one = plan_journey(slow, "c0", 0, 1_000_000, 0, 0, seed=1, queue=3.0, line=slow.server_bits_per_second)
    assert (one.queue, one.download) == (3, to_ticks(0.085 + 8))
    assert sending_seconds(slow, 1_000_000, 3) == 24
    assert sending_seconds(Network(), 1_000_000, 3) == 0
    ringer = plan_journey(
        slow, "c0", 0, 3_000_000, 0, 0, seed=1, messages=3, line=1e6
    )  # two thirds come from a neighbour
    assert ringer.download == pytest.approx(3 * 0.085 + 8 + 2 * 8 / 9, abs=1e-6)


def test_edges_have_a_way_of_their_own_where_the_network_says_so():
    assert edge_transfer(Network(links="3g"), "edge-0", 0, 10**6, seed=1) == EdgeTransfer()
    assert edge_transfer(Network(edge_links="4g"), "edge-0", 0, 9 * 10**6, seed=1) == EdgeTransfer(
        0.0, to_ticks(0.085 + 8), to_ticks(0.085 + 8)
    )
    one = Network(overrides={"edge-1": "3g"}, jitter=0.5)
    assert edge_transfer(one, "edge-0", 0, 10**6, seed=1) == EdgeTransfer()
    ways = [edge_transfer(one, "edge-1", number, 10**6, seed=1) for number in range(3)]
    assert len({way.upload for way in ways}) == 3
    assert edge_transfer(Network(server_bits_per_second=8e6), "edge-0", 0, 10**6, 1, queue=2.0) == EdgeTransfer(
        2.0, 1.0, 0.0
    )


def test_a_journey_depends_on_seed_round_and_node_and_on_nothing_else():
    def of(**changed):
        given = {"node": "c1", "round_index": 3, "seed": 7} | changed
        return plan_journey(MIXED, bytes_down=10_000, bytes_up=10_000, flops=1e9, **given)

    first = of()
    plan_journey(MIXED, "c9", 3, 1, 1, 1, seed=7)
    assert of() == first
    assert len({of(round_index=number).download for number in range(5)}) == 5
    assert of(seed=8).compute != first.compute
    assert of(node="c2").compute != first.compute


def test_a_nodes_profile_is_drawn_once_and_in_the_given_shares():
    drawn = {f"c{number}": profile_of(MIXED, f"c{number}", seed=1) for number in range(400)}
    assert drawn["c7"] == profile_of(MIXED, "c7", seed=1)
    assert len({link.download_bits_per_second for link, _ in drawn.values()}) == 400  # each its own, by the spread
    plain = msgspec.structs.replace(MIXED, spread=0.0)
    found = Counter(profile_of(plain, f"c{number}", seed=1) for number in range(400))
    assert found[LINKS["4g"], DEVICES["phone"]] == pytest.approx(160, abs=40)
    assert found[LINKS["3g"], DEVICES["laptop"]] == pytest.approx(40, abs=20)
    assert len(found) == 4


def test_shares_draw_alike_in_whatever_order_they_are_written():
    first, second = Network(links={"4g": 0.5, "3g": 0.5}), Network(links={"3g": 0.5, "4g": 0.5})
    assert first == second
    assert [profile_of(first, f"c{n}", 0) for n in range(30)] == [profile_of(second, f"c{n}", 0) for n in range(30)]


def test_spread_is_log_normal_around_the_profile_and_jitter_around_the_mean():
    network = Network(links="4g", spread=0.5)
    rates = [profile_of(network, f"c{number}", 5)[0].upload_bits_per_second / 9e6 for number in range(2000)]
    assert np.mean(np.log(rates)) == pytest.approx(0, abs=0.05)
    assert np.std(np.log(rates)) == pytest.approx(0.5, abs=0.03)
    times = [plan_journey(Network(jitter=0.4), "c0", number, 0, 0, 100e9, seed=5).compute for number in range(2000)]
    assert np.mean(times) == pytest.approx(1, abs=0.04)
    assert np.std(np.log(times)) == pytest.approx(0.4, abs=0.03)


def test_availability_and_loss_come_as_often_as_they_should_and_do_not_shift_the_times():
    network = Network(links="bad", profiles={"bad": Link(1e6, 1e6, loss=0.2)}, availability=0.7, jitter=0.5)
    steady = Network(links="bad", profiles={"bad": Link(1e6, 1e6)}, jitter=0.5)
    ill = [plan_journey(network, "c0", number, 1000, 1000, 1e9, seed=2) for number in range(1000)]
    well = [plan_journey(steady, "c0", number, 1000, 1000, 1e9, seed=2) for number in range(1000)]
    assert sum(one.available for one in ill) == pytest.approx(700, abs=50)
    assert sum(one.lost for one in ill) == pytest.approx(200, abs=45)
    assert [one.total for one in ill] == [one.total for one in well]
    assert holds_for_each(one.usable for one in well)


def test_overrides_and_own_profiles():
    network = Network(
        profiles={"satellite": Link(50e6, 5e6, 0.3), "watch": Device(1e9, 2**29)},
        overrides={"c1": "satellite", "c2": ["lora", "watch"]},
        server="laptop",
    )
    assert profile_of(network, "c0", 0) == (LINKS["fibre"], DEVICES["laptop"])
    assert profile_of(network, "c1", 0) == (Link(50e6, 5e6, 0.3), DEVICES["laptop"])
    assert profile_of(network, "c2", 0) == (LINKS["lora"], Device(1e9, 2**29))
    assert aggregation_seconds(network, updates=100, size=1_000_000) == to_ticks(2e8 / 100e9)
    assert msgspec.json.decode(msgspec.json.encode(network), type=Network) == network


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"links": "5g"}, "Unknown link '5g'"),
        ({"links": "fiber"}, "Did you mean 'fibre'"),
        ({"devices": {"phone": 0.5, "laptpo": 0.5}}, "Did you mean 'laptop'"),
        ({"links": {"4g": 0.5, "3g": 0.4}}, "add up to 1"),
        ({"links": {}}, "add up to 1"),
        ({"overrides": {"c3": "lorra"}}, "Override of c3: Unknown link or device 'lorra'.*Did you mean 'lora'"),
        ({"profiles": {"phone": Link(1.0, 1.0)}}, "own profile cannot be 'phone'"),
        ({"server": "mainframe"}, "Unknown device 'mainframe'"),
        ({"availability": 1.5}, "availability of network"),
        ({"deadline_seconds": 0}, "deadline_seconds of network"),
        ({"over_selection": 0.9}, "over_selection of network"),
        ({"server_bits_per_second": 0}, "server_bits_per_second of network"),
        ({"edge_links": "5g"}, "Unknown link '5g'"),
        ({"jitter": -1}, "jitter of network"),
        ({"spread": math.nan}, "spread of network"),
    ],
)
def test_impossible_networks_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Network(**settings)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(0, 1),
        lambda: Link(1, 1, latency_seconds=-1),
        lambda: Link(1, 1, duty=0),
        lambda: Device(1, 0),
        lambda: Device(1, 1, 0),
    ],
)
def test_impossible_profiles_are_refused(make):
    with pytest.raises(ConfigError, match="cannot be"):
        make()


def test_over_selection_asks_more_but_not_more_than_there_are():
    assert Network(over_selection=1.3).selected(10, 100) == 13
    assert Network(over_selection=1.1).selected(50, 100) == 55  # 50 × 1.1 is above 55 in floating point
    assert Network(over_selection=2.0).selected(80, 100) == 100


# Rounds.


@given(
    journeys=cohorts(),
    began=st.floats(0, 1e6),
    deadline=st.none() | st.floats(0.001, 1e5),
    needed=st.none() | st.integers(1, 8),
    aggregate=st.floats(0, 10),
)
def test_every_nodes_parts_add_up_to_the_round_exactly(journeys, began, deadline, needed, aggregate):
    ways = {"edge-0": EdgeTransfer(0.0, 0.5, 2.0)}
    limits = {"began": began, "needed": needed, "deadline": deadline, "aggregate": aggregate}
    for table in (
        time_synchronous_round(journeys, **limits),
        time_synchronous_round(journeys, **limits, edge_transfers=ways),
    ):
        table = dataclasses.replace(table, evaluate=to_ticks(1.7))  # noqa: PLW2901
        for parts in (table.server_parts(), *(table.parts(one) for one in journeys)):
            assert sum(parts.values()) == table.seconds
            assert min(parts.values()) > 0
        for group in table.groups:
            assert 0 <= group.seconds <= table.closed
        everybody = [*table.accepted, *table.late, *table.failed, *table.absent]
        assert sorted(everybody) == sorted(one.node for one in journeys)
        if deadline is not None:
            assert table.collected <= to_ticks(deadline)
        if needed is not None:
            assert len(table.accepted) <= needed


@given(journeys=cohorts(), deadline=st.none() | st.floats(0.001, 1e5), shuffled=st.randoms(use_true_random=False))
def test_a_round_does_not_depend_on_the_order_of_its_journeys(journeys, deadline, shuffled):
    mixed = list(journeys)
    shuffled.shuffle(mixed)
    first, second = (time_synchronous_round(order, deadline=deadline, needed=3) for order in (journeys, mixed))
    assert (first.accepted, first.late, first.failed, first.ends) == (
        second.accepted,
        second.late,
        second.failed,
        second.ends,
    )


def test_a_round_ends_with_its_slowest_client():
    table = time_synchronous_round([trip("c0", 1, 2, 1), trip("c1", 1, 7, 2)], began=50.0, aggregate=0.5)
    assert (table.accepted, table.seconds, table.ends) == (("c0", "c1"), 10.5, 60.5)
    fast, slow = table.journeys
    assert table.parts(fast) == {"download": 1, "compute": 2, "upload": 1, "wait": 6.5}
    assert table.parts(slow) == {"download": 1, "compute": 7, "upload": 2, "wait": 0.5}
    assert table.server_parts() == {"wait": 10, "aggregate": 0.5}
    assert table.waited_for == "c1"


def test_a_deadline_cuts_the_straggler_off_in_the_middle_of_its_work():
    table = time_synchronous_round([trip("c0", 1, 2, 1), trip("c1", 1, 70, 2)], deadline=10)
    assert (table.accepted, table.late, table.seconds) == (("c0",), ("c1",), 10)
    assert (table.waited_for, table.cut_off) == ("c1", True)
    assert table.parts(table.journeys[1]) == {"download": 1, "compute": 9}


def test_the_parts_of_a_journey_come_in_their_order():
    one = trip("c0", 2, 8, 32, queue=1, data=4)
    assert [*journey_parts(one, 100, 100).items()] == [
        ("queue", 1), ("download", 2), ("data", 4), ("compute", 8), ("upload", 32), ("wait", 53),
    ]  # fmt: skip


def test_over_selection_ends_the_round_with_the_last_one_that_is_needed():
    journeys = [trip(f"c{number}", compute=float(number + 1)) for number in range(4)]
    table = time_synchronous_round(journeys, needed=2, deadline=10)
    assert (table.accepted, table.late, table.seconds) == (("c0", "c1"), ("c2", "c3"), 2)


def test_the_lost_are_waited_for_and_the_absent_are_not():
    journeys = [trip("c0", compute=1), trip("c1", compute=3, lost=True), trip("c2", compute=9, available=False)]
    assert time_synchronous_round(journeys, deadline=10).seconds == 10
    table = time_synchronous_round(journeys)
    assert (table.accepted, table.failed, table.absent, table.seconds) == (("c0",), ("c1",), ("c2",), 3)
    assert table.parts(journeys[2]) == {"away": 3}
    assert table.waited_for == "c1"
    assert time_synchronous_round(journeys[::2], deadline=10).seconds == 1
    broken = dataclasses.replace(journeys[0], corrupted=True)
    assert time_synchronous_round([broken], deadline=10).failed == ("c0",)
    assert time_synchronous_round([broken], deadline=10).seconds == 1  # it came, and was no use


def test_groups_wait_for_their_last_and_edges_send_what_they_have():
    members = [trip("c0", 1, 2, 1, group="edge-0"), trip("c1", 1, 7, 2, group="edge-0"), trip("c2", 1, group="edge-1")]
    table = time_synchronous_round(members)
    assert [(g.name, dict(g.parts), g.waited_for) for g in table.groups] == [
        ("edge-0", {"wait": 10}, "c1"),
        ("edge-1", {"wait": 1}, "c2"),
    ]
    assert (table.closed, table.waited_for) == (10, "c1")
    far = time_synchronous_round(
        [dataclasses.replace(one, queue=0.5 if one.group == "edge-1" else 0.0) for one in members],
        edge_transfers={"edge-1": EdgeTransfer(0.0, 0.5, 20.0)},
        deadline=9,
    )
    assert (far.collected, far.closed, far.waited_for, far.accepted) == (9, 21.5, "edge-1", ("c2", "c0"))
    assert far.groups[1].parts == {"download": 0.5, "wait": 1, "upload": 20}
    assert far.groups[0].waited_for == "c1"  # which is late
    assert far.parts(far.journeys[0]) == {"download": 1, "compute": 2, "upload": 1, "wait": 17.5}


def test_over_selected_groups_wait_until_enough_are_there():
    journeys = [trip("c0", compute=1.0, group="edge-0"), trip("c1", compute=5.0, group="edge-1")]
    table = time_synchronous_round(journeys, needed=1)
    assert [(g.name, g.seconds, g.waited_for) for g in table.groups] == [("edge-0", 1, "c0"), ("edge-1", 1, "c0")]


def test_nobody_there_is_an_empty_round():
    table = time_synchronous_round([trip("c0", compute=9, available=False)], deadline=5)
    assert (table.accepted, table.seconds) == ((), 0)


def test_what_never_ends_needs_a_deadline():
    for_ever = [trip("c0", compute=math.inf), trip("c1", compute=1)]
    assert time_synchronous_round(for_ever, deadline=5).late == ("c0",)
    with pytest.raises(ConfigError, match="c0 never finishes"):
        time_synchronous_round(for_ever)


# Asynchronous.
