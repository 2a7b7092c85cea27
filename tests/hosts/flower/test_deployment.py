# SPDX-License-Identifier: Apache-2.0
"""A deployment of real processes in which everything goes wrong: every fault is named, and what was seen is kept.

A client raises, one sleeps past the deadline, one is killed, and the SuperLink dies in mid-round and comes back.
"""

from pathlib import Path

import pytest

from fedvitals.records import Event, Finding, Span
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.store.upkeep.doctor import examine
from fedvitals_studies.flower.app_folder import write_app
from support.conditions import holds_for_each
from support.flower.processes import Federation, SuperNode, deployed, until
from support.flower.records import SLOW, check_trace, cohorts, events_of, runs_of

pytestmark = pytest.mark.flower

SECRET = "cannot read its data"  # words of a client's exception
# By partition and round. Whoever is to be killed sleeps meanwhile.
PLANTED = """

PLAN = {(0, 2): "fail", (1, 2): "timeout", (2, 3): "timeout"}


def fault_of(config, partition, number):
    fault = PLAN.get((partition, number), "none")
    print(f"round {number}: {fault}, pid {os.getpid()}", flush=True)
    return fault
"""


def planted_app(folder: Path) -> Path:
    """The patient with two lines of fedvitals, and several faults in one run."""
    write_app(folder, "two-lines")
    with (folder / "patient" / "faults.py").open("a") as file:
        file.write(PLANTED)
    return folder


def failures(store: Path, run: str) -> dict[str | None, Event]:
    """By node; nobody fails twice."""
    found = events_of(store, run, "client.failed", "client.dropped_out")
    assert len(found) == len({event.where.node for event in found}), found
    return {event.where.node: event for event in found}


def check_faults(store: Path, run: str, nodes: list[SuperNode]) -> None:
    """What was planted in rounds 1 to 3, and nothing else, by the names that Flower has for the nodes."""
    raised, slept, killed = (node.identity for node in nodes)
    failed = failures(store, run)
    assert set(failed) == {raised, killed}
    kept = ("code", "phase", "round")
    assert [failed[raised].data[key] for key in kept] == [2, "train", 2]
    assert failed[raised].data["exception"] == "RuntimeError"
    assert [failed[killed].data[key] for key in kept] == [8, "train", 3]  # CLIENT_APP_CRASHED
    late = {(event.where.round, event.where.node) for event in events_of(store, run, "update.late")}
    assert (2, slept) in late
    busy = {(event.where.round, event.where.node) for event in events_of(store, run, "client.busy")}
    assert (3, slept) in busy
    with open_reader(store) as reader:
        found = {(finding.issue, finding.where.node) for finding in queries.records(reader, run, Finding)}
        crashed = {node for issue, node in found if issue == "CRASH"}
        assert crashed - {None} == {raised, killed}  # None: the round in which the server itself was cut off
        # A client's words leave it at a higher privacy level only: also when Flower's own log quotes them.
        assert not [event for event in queries.events(reader, run) if SECRET in event.message]


def check_everybody_is_accounted_for(store: Path, run: str, nodes: list[SuperNode]) -> None:
    everybody = {node.identity for node in nodes}
    for number, found in cohorts(store, run).items():
        assert found["asked"] == everybody, number
        assert found["answered"] | found["failed"] | found["late"] == everybody, number
        assert not found["answered"] & (found["failed"] | found["late"]), number
    assert nodes[1].identity in cohorts(store, run)[2]["late"]


def check_kept(store: Path, run: str) -> None:
    """The server's process was cut off in the midst of a round: all that was before is there, and whole.

    Flower kills that process, or lets it end by itself if it notices in time that the SuperLink is gone.
    """
    signs = examine(store)
    assert "trouble" not in {sign.state for sign in signs}, signs
    ended = cohorts(store, run)
    assert [*ended] == [*range(1, len(ended) + 1)]
    with open_reader(store) as reader:
        summary = queries.summary_of(reader, run)
        assert (summary.host, summary.clients, summary.lost) == ("flower", 3, 0)
        assert (summary.finished is None) == any("killed" in sign.text for sign in signs), signs
        if summary.finished is not None:
            assert any(event.name == "round.failed" for event in queries.records(reader, run, Event))
        rounds = [span.where.round for span in queries.records(reader, run, Span) if span.name == "round"]
        assert rounds == [*ended]
        attended = queries.attendance(reader, run)
        for number, found in ended.items():
            if found["answered"]:
                assert "loss" in queries.round_table(reader, run, number)[None]
            for node in found["answered"]:
                assert number in attended[node]
                assert "loss" in queries.round_table(reader, run, number)[node]


def check_second_run(federation: Federation, app: Path, store: Path, nodes: list[SuperNode]) -> None:
    """On the SuperLink that was restarted: the SuperNodes come back by themselves, under their names."""
    everybody = {node.identity for node in nodes}
    until(lambda: federation.online() == everybody, SLOW, "the SuperNodes")
    settings = {"num_server_rounds": 1, "fraction_evaluate": 0.0, "min_nodes": 3, "round_timeout": SLOW}
    run = federation.submit(app, store=store, **settings)
    assert run.wait(SLOW) == 0, run.log()[-3000:]
    assert holds_for_each(node.alive for node in nodes)
    _, second = runs_of(store)
    assert cohorts(store, second)[1]["answered"] == everybody
    check_trace(store, second, nodes)


def test_every_fault_of_a_deployment_is_named_and_the_store_outlives_the_superlink(tmp_path):
    app, store = planted_app(tmp_path / "app"), tmp_path / "runs.db"
    with deployed(tmp_path) as federation:
        nodes = federation.add_nodes(3)
        # A client that is well needs about as long for a round as a SuperNode needs to start: 5 s on an idle machine.
        settings = {"round_timeout": max(20.0, 5 * federation.pace), "fraction_evaluate": 0.0, "min_nodes": 3}
        run = federation.submit(app, store=store, num_server_rounds=30, **settings)

        nodes[2].says(r"(round 3: timeout)", SLOW)
        (client,) = nodes[2].apps()
        client.kill()
        # Read while it is being written, until it is told what became of that client and the next round has begun.
        until(lambda: nodes[2].identity in failures(store, runs_of(store)[0]), SLOW, "the killed client's failure")
        told = max(cohorts(store, runs_of(store)[0]))
        until(lambda: any(f"round {told + 2}:" in node.log() for node in nodes), SLOW, "the next round")

        federation.restart_superlink()
        assert run.wait(SLOW) != 0  # it says so, and does not hang
        (ours,) = runs_of(store)
        check_kept(store, ours)
        check_faults(store, ours, nodes)
        check_everybody_is_accounted_for(store, ours, nodes)
        check_trace(store, ours, nodes)
        check_second_run(federation, app, store, nodes)
    assert federation.marked() == []
