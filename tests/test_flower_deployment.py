# SPDX-License-Identifier: Apache-2.0
"""A deployment of real processes in which everything goes wrong: every fault is named, and what was seen is kept.

A client raises, one sleeps past the deadline, one is killed, and the SuperLink dies in mid-round and comes back.
"""

import re
from pathlib import Path

import pytest

from fedvitals.parts import CLIENT, JOURNEY, ROUND
from fedvitals.records import Event, Span
from fedvitals.store import open_reader, queries
from fedvitals.store.doctor import examine
from fedvitals.trials.flower_app import write_app
from flower_processes import SHORT, Federation, SuperNode, deployed

pytestmark = pytest.mark.flower

# By partition and round. Whoever is to be killed sleeps meanwhile.
PLANTED = """

PLAN = {(0, 2): "fail", (1, 2): "timeout", (2, 3): "timeout"}


def fault_of(config, partition, number):
    fault = PLAN.get((partition, number), "none")
    print(f"round {number} of {config['num-server-rounds']}: {fault}, pid {os.getpid()}", flush=True)
    return fault
"""


def planted_app(folder: Path) -> Path:
    """The patient with two lines of fedvitals, and several faults in one run."""
    write_app(folder, "two-lines")
    with (folder / "patient" / "faults.py").open("a") as file:
        file.write(PLANTED)
    return folder


def told(store: Path, run: str, *names: str) -> set[tuple[str, int | None, str | None]]:
    """Events of these names: name, round, node."""
    with open_reader(store) as reader:
        found = [event for event in queries.events(reader, run) if event.name in names]
    return {(event.name, event.where.round, event.where.node) for event in found}


def the_event(store: Path, run: str, name: str, node: str) -> Event:
    with open_reader(store) as reader:
        (found,) = [e for e in queries.events(reader, run) if e.name == name and e.where.node == node]
    return found


def cohorts(store: Path, run: str) -> dict[int, dict[str, set[str]]]:
    """By round: who was asked, answered, …"""
    with open_reader(store) as reader:
        found = [event for event in queries.events(reader, run) if event.name == "cohort"]
    kinds = ("asked", "answered", "failed", "late", "busy")
    return {event.where.round: {kind: set(event.data[kind]) for kind in kinds} for event in found}


def runs_of(store: Path) -> list[str]:
    """The oldest first."""
    with open_reader(store) as reader:
        return [run.id for run in reversed(queries.list_runs(reader))]


def check_trace(store: Path, run: str, nodes: list[SuperNode], clients: set[tuple[int, str]]) -> None:
    """Every client's Span is joined to its round, over that of its journey, and was made in a process of its own."""
    with open_reader(store) as reader:
        spans = {span.id: span for span in queries.records(reader, run, Span)}
    assert len({span.trace for span in spans.values()}) == 1
    own = [span for span in spans.values() if span.name == CLIENT]
    assert {(span.where.round, span.where.node) for span in own} == clients
    assert len(own) == len(clients)
    for span in own:
        journey = spans[span.parent or ""]
        assert (journey.name, journey.where.node, journey.where.round) == (JOURNEY, span.where.node, span.where.round)
        assert (spans[journey.parent or ""].name, spans[journey.parent or ""].where.round) == (ROUND, span.where.round)
    for node in nodes:
        pids = re.findall(r"pid (\d+)", node.log())
        seen = [
            pid for span in own if span.where.node == node.identity for pid in re.findall(r"worker-(\d+)-", span.source)
        ]
        assert len(seen) == len(set(seen)) > 0  # each message has a process of its own; the node keeps its name
        assert set(seen) <= set(pids)


def check_faults(store: Path, run: str, nodes: list[SuperNode]) -> None:
    """What was planted in rounds 1 to 3, and nothing else, by the names that Flower has for the nodes."""
    first, second, third = (node.identity for node in nodes)
    everybody = {first, second, third}
    kinds = ("client.failed", "client.dropped_out", "update.late", "client.busy", "telemetry.refused", "update.refused")
    assert told(store, run, *kinds) >= {
        ("client.failed", 2, first),
        ("update.late", 2, second),
        ("client.busy", 3, second),
        ("client.failed", 3, third),
    }
    raised, died = (the_event(store, run, "client.failed", node).data for node in (first, third))
    assert (raised["exception"], raised["code"], raised["phase"]) == ("RuntimeError", 2, "train")
    assert (died["code"], died["phase"]) == (8, "train")  # CLIENT_APP_CRASHED
    assert the_event(store, run, "update.late", second).data["phase"] == "train"
    found = cohorts(store, run)
    nobody: set[str] = set()
    assert found[1] == {"asked": everybody, "answered": everybody, "failed": nobody, "late": nobody, "busy": nobody}
    assert found[2] == {"asked": everybody, "answered": {third}, "failed": {first}, "late": {second}, "busy": nobody}
    assert (found[3]["asked"], found[3]["failed"], found[3]["busy"]) == (everybody, {third}, {second})
    assert first in found[3]["answered"]


def end_client_app(node: SuperNode, deadline: float) -> None:
    """`kill -9` of a client in the midst of its training."""
    node.says(r"(round 3 of \d+: timeout)", SHORT + 3 * deadline)
    (app,) = node.apps()
    app.kill()


def check_kept(store: Path, run: str, nodes: list[SuperNode]) -> None:
    """After the server's process was cut off in the midst of a round: all that was before it is there, and whole."""
    everybody = {node.identity for node in nodes}
    assert "trouble" not in {sign.state for sign in examine(store)}, examine(store)
    with open_reader(store) as reader:
        summary = queries.summary_of(reader, run)
        assert summary.rounds >= 3
        assert summary.host == "flower"
        assert summary.clients == 3
        ended = {span.where.round for span in queries.records(reader, run, Span) if span.name == ROUND}
        assert ended >= {1, 2, 3}
        attended = queries.attendance(reader, run, everybody)
        assert all(1 in attended[node] for node in everybody)
        assert "loss" in queries.round_table(reader, run, 1)[nodes[0].identity]


def check_second_run(federation: Federation, app: Path, store: Path, nodes: list[SuperNode]) -> None:
    """On the SuperLink that was restarted: the SuperNodes are there, under their names."""
    run = federation.submit(app, store=store, num_server_rounds=1, fraction_evaluate=0.0, min_nodes=3)
    assert run.wait(2 * SHORT) == 0, run.log()[-3000:]
    assert all(node.alive for node in nodes)
    everybody = {node.identity for node in nodes}
    _, second = runs_of(store)
    assert cohorts(store, second)[1]["answered"] == everybody
    check_trace(store, second, nodes, {(1, node) for node in everybody})


def test_every_fault_of_a_deployment_is_named_and_the_store_outlives_the_superlink(tmp_path):
    app, store = planted_app(tmp_path / "app"), tmp_path / "runs.db"
    with deployed(tmp_path) as federation:
        nodes = federation.add_nodes(3)
        # Of a round: a client that is well needs 5 s on an idle machine, about as long as a SuperNode needs to start.
        deadline = max(25.0, 6 * federation.pace)
        settings = {"round_timeout": deadline, "fraction_evaluate": 0.0, "min_nodes": 3}
        run = federation.submit(app, store=store, num_server_rounds=9, **settings)
        end_client_app(nodes[2], deadline)
        nodes[0].says(r"(round 4 of 9)", 2 * deadline)
        federation.restart_superlink()
        assert run.wait(SHORT) != 0  # it says so, and does not hang
        (ours,) = runs_of(store)
        check_kept(store, ours, nodes)
        check_faults(store, ours, nodes)
        answered = {(number, node) for number, found in cohorts(store, ours).items() for node in found["answered"]}
        check_trace(store, ours, nodes, answered)
        check_second_run(federation, app, store, nodes)
    assert federation.marked() == []
