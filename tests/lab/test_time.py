# SPDX-License-Identifier: Apache-2.0
"""Where the time of a round goes, on the virtual and on the real clock, in every topology."""

from __future__ import annotations

import itertools

import pytest

from fedvitals import lab
from fedvitals.lab.network.profiles import Device, Link
from fedvitals.monitor.monitor import Monitor
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each
from support.lab.by_hand import Watcher, experiment
from support.lab.timed import BUSY, TOPOLOGIES

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

GROUPED = ("hierarchical", "rings")  # from the first round on


def spans_and_metrics(e, **more):
    """The spans of a run, by their ids, and its metrics."""
    sink = MemorySink()
    with Monitor(None, sinks=[sink], strict=True) as monitor:
        lab.run(e, monitor, **{"engine": "sequential", **more})
    spans = {r.id: r for r in sink.records if type(r).__name__ == "Span"}
    return spans, [r for r in sink.records if type(r).__name__ == "Metric"]


def virtual(spans, name, number):
    return [
        s for s in spans.values() if (s.name, s.where.round, s.attributes.get("clock")) == (name, number, "virtual")
    ]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_virtual_round_is_told_as_nested_spans_whose_parts_fill_it(name):
    e = experiment(topology=TOPOLOGIES[name], network=BUSY, rounds=3, clients=9)
    spans, metrics = spans_and_metrics(e)
    for number in range(3):
        (whole,) = virtual(spans, "round", number)
        (server,) = virtual(spans, "server", number)
        assert whole.where.node is None
        assert (server.where.node, server.parent, server.at, server.seconds) == (
            "server",
            whole.id,
            whole.at,
            whole.seconds,
        )
        assert [*server.attributes["parts"]] == ["wait", "aggregate", "evaluate"]
        assert sum(server.attributes["parts"].values()) == whole.seconds
        edges = {s.id: s for s in virtual(spans, "edge", number)}
        journeys = virtual(spans, "journey", number)
        assert sorted(s.where.node for s in journeys) == list(e.nodes)
        for span in edges.values():
            assert span.parent == whole.id
            assert sum(span.attributes["parts"].values()) == span.seconds
            assert span.attributes["waited_for"] in e.nodes
            assert whole.at <= span.at
            assert span.seconds <= server.attributes["parts"]["wait"]
        for span in journeys:
            assert sum(span.attributes["parts"].values()) == span.seconds == whole.seconds
            assert span.at == whole.at
            present = "away" not in span.attributes["parts"]
            above = edges[span.parent].where.node if span.parent in edges else None
            assert span.where.group == above or not present
            assert above is not None or span.parent == whole.id
            closing = server.attributes["waited_for"]
            assert not present or span.attributes["waited_for"] in {closing, "server"}
            assert span.attributes.get("folded", False) == (name in GROUPED)
        assert bool(edges) == (name in GROUPED or (name == "clustered" and number > 0))
        lengths = [m.value for m in metrics if m.name == "time.round_virtual" and m.where.round == number]
        assert lengths == [whole.seconds]
    by_round = [virtual(spans, "round", number)[0] for number in range(3)]
    for before, after in itertools.pairwise(by_round):
        assert before.at + before.seconds == pytest.approx(after.at, abs=1e-5)  # `at` is of the epoch: microseconds


def test_what_takes_time_at_the_server_and_on_its_line_by_hand():
    """Of nine clients the i-th waits for i models to be sent; everybody reads its samples; the server tests at last."""
    own = {"link": Link(8e6, 8e6), "device": Device(1e8, 2**30, samples_per_second=16.0)}
    network = lab.Network(links="link", devices="device", profiles=own, server="device", server_bits_per_second=8e5)
    e = experiment(network=network, rounds=2, evaluation=lab.Evaluation(every=2))
    site, watcher = lab.Site.of(e), Watcher()
    lab.run(e, watcher, engine="sequential")
    model = 8 * 4 * site.layout.size / 8e5
    ways = [s for s in watcher.spans if s[1] == "journey"][:9]
    for place, (node, _, _, _, _, more) in enumerate(ways):
        parts = more["parts"]
        assert node == f"c{place}"
        assert parts.get("queue", 0.0) == pytest.approx(place * model, abs=1e-5)
        assert parts["download"] == pytest.approx(model, abs=1e-5)  # the server's line is the narrower one
        assert parts["data"] == 4 * 8 / 16
    assert ways[8][5]["waited_for"] == "server"
    assert ways[0][5]["waited_for"] == "c8"
    servers = [s[5]["parts"] for s in watcher.spans if s[1] == "server"]
    assert "evaluate" not in servers[0]
    assert servers[1]["evaluate"] == pytest.approx(len(site.dataset.test_y) * site.forward_flops / 1e8, abs=1e-6)
    logged = {node: values for node, values in watcher.logged if node and "time.client_virtual" in values}
    assert logged["c3"]["time.queue"] == pytest.approx(3 * model, abs=1e-5)
    assert logged["c3"]["time.data"] == 2
    whole = sum(logged["c3"][f"time.{part}"] for part in ("queue", "download", "data", "upload"))
    assert logged["c3"]["time.client_virtual"] == whole + logged["c3"]["time.compute_virtual"]
    assert "time.queue" not in logged["c0"]


def test_forward_pass_is_less_than_half_of_the_way_there_and_back():
    site = lab.Site.of(experiment())
    assert site.flops / 3 <= site.forward_flops < site.flops / 2


def test_edges_send_their_average_over_a_link_of_their_own():
    slow = lab.Network(overrides={"edge-1": "3g"})
    e = experiment(topology=lab.Hierarchical(edges=3), network=slow, rounds=1)
    watcher = Watcher()
    lab.run(e, watcher, engine="sequential")
    spans = {node: (seconds, more) for node, _, _, seconds, _, more in watcher.spans}
    assert [*spans["edge-1"][1]["parts"]] == ["download", "wait", "upload"]
    assert [*spans["edge-0"][1]["parts"]] == ["wait"]
    assert spans["server"][1]["waited_for"] == "edge-1"
    assert spans["server"][1]["parts"]["wait"] == spans["edge-1"][0]
    member = spans["edge-1"][1]["waited_for"]
    assert spans[member][1]["parts"]["queue"] == spans["edge-1"][1]["parts"]["download"]


def test_the_late_the_lost_and_the_absent_say_so():
    network = lab.Network(overrides={"c3": "lora"}, deadline_seconds=5.0)
    faults = [lab.LostMessage(nodes=["c1"]), lab.DropOut(nodes=["c2"]), lab.ClockSkew(nodes=["c4"], seconds=100.0)]
    watcher = Watcher()
    lab.run(experiment(network=network, faults=faults, rounds=1), watcher, engine="sequential")
    spans = {node: (began, more) for node, _, began, _, _, more in watcher.spans}
    assert spans["c3"][1]["late"] is True
    assert spans["c1"][1]["lost"] is True
    assert [*spans["c2"][1]["parts"]] == ["away"]
    assert (spans["server"][1]["waited_for"], spans["server"][1]["deadline"]) == ("c3", True)
    assert spans["c4"][0] == 0.0  # the server's clock, whatever the client's says
    assert spans["c4"][1]["clock_offset"] == pytest.approx(100, abs=spans["c4"][1]["clock_error"])
    assert not {"late", "lost"} & {*spans["c0"][1]}


def test_asynchronous_rounds_tell_whole_journeys_and_queue_at_the_servers_line():
    network = lab.Network(jitter=0.8, availability=0.7, deadline_seconds=1.0, server_bits_per_second=1e5)
    e = experiment(
        topology=lab.Asynchronous(buffer=3, concurrency=6),
        network=network,
        rounds=5,
        faults=[lab.Timeout(nodes=["c2"])],
    )
    spans, _ = spans_and_metrics(e)
    whole = {number: virtual(spans, "round", number)[0] for number in range(5)}
    gone = set()
    for number, span in whole.items():
        (server,) = virtual(spans, "server", number)
        assert sum(server.attributes["parts"].values()) == span.seconds
        for one in virtual(spans, "journey", number):
            assert one.parent == span.id
            assert sum(one.attributes["parts"].values()) == one.seconds
            assert one.at + one.seconds == pytest.approx(span.at + span.seconds, abs=1e-5)
            gone |= {key for key in ("late", "lost") if key in one.attributes} | {*one.attributes["parts"]} & {"away"}
    assert gone >= {"late", "away"}
    ways = [s.attributes["parts"] for n in whole for s in virtual(spans, "journey", n)]
    assert any("queue" in parts for parts in ways)


def test_the_line_of_an_asynchronous_server_is_as_busy_after_a_resumption(tmp_path):
    network = lab.Network(jitter=0.8, server_bits_per_second=1e5)
    e = experiment(topology=lab.Asynchronous(buffer=2, concurrency=6), network=network, rounds=4)
    whole, again = Watcher(), Watcher()
    lab.run(e, whole, engine="sequential")
    for result in lab.rounds(e, engine="sequential", checkpoint=tmp_path):
        if len(result.rounds) == 2:
            break
    lab.run(e, again, engine="sequential", checkpoint=tmp_path, resume=True)
    assert [s[:4] for s in again.spans] == [s[:4] for s in whole.spans][-len(again.spans) :]


class Twice:
    """Trains two times in a round."""

    def check(self, experiment):
        pass

    def round(self, federation):
        model = federation.server.model
        for _ in range(2):
            tasks = [lab.Task(federation.round, (node,), model) for node in federation.cohort()]
            model = federation.aggregate(federation.train(tasks))
        return model


def test_a_topology_that_trains_twice_has_one_round_that_is_as_long_as_both():
    watcher = Watcher()
    lab.run(experiment(topology=Twice(), network=lab.Network(), rounds=1), watcher, engine="sequential")
    ((_, _, _, length, _, _),) = [s for s in watcher.spans if s[1] == "round"]
    ((*_, server),) = [s for s in watcher.spans if s[1] == "server"]
    assert sum(server["parts"].values()) == length
    assert server["folded"] is True
    for node in ("c0", "c8"):
        own = [s for s in watcher.spans if s[0] == node]
        assert sum(sum(s[5]["parts"].values()) for s in own) == length
        assert own[0][2] + own[0][3] == own[1][2]


@pytest.mark.parametrize("engine", ["sequential", "stacked", "reuse"])
@pytest.mark.parametrize("name", [*TOPOLOGIES, "asynchronous"])
def test_the_servers_real_time_is_put_down_to_parts(name, engine):
    """Laps leave nothing out; the bounds are wide, since a busy machine may stop a process anywhere."""
    e = experiment(
        topology=TOPOLOGIES.get(name) or lab.Asynchronous(buffer=9),
        network=lab.Network(jitter=0.1) if name == "asynchronous" else None,
        local=lab.Local(iterations=40, batch=8),
        rounds=3,
    )
    watcher = Watcher()
    result = lab.run(e, watcher, engine=engine, workers=2 if engine == "reuse" else 1)
    parts = {part: sum(hours.get(part, 0.0) for hours in watcher.hours) for part in watcher.hours[0]}
    assert {"wait", "receive", "aggregate", "evaluate"} <= {*parts}
    assert holds_for_each(seconds >= 0 for hours in watcher.hours for seconds in hours.values())
    assert max(parts, key=lambda part: parts[part]) == "wait"  # forty steps of nine clients
    length = sum(one.seconds for one in result.rounds)
    assert 0.8 * length < sum(parts.values()) <= length


def test_new_settings_survive_toml_and_old_ones_are_written_as_before():
    e = experiment(network=BUSY)
    assert lab.read(e.to_toml()) == e
    plain = experiment(network=lab.Network()).to_toml()
    assert not any(word in plain for word in ("server_bits_per_second", "edge_links", "samples_per_second"))
