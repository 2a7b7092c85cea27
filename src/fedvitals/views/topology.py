# SPDX-License-Identifier: Apache-2.0
"""Computes who exchanged messages in a round: nodes with their groups and health, and the bytes between them.

With many clients, the healthy ones of each group are one dot with their number; an unhealthy client keeps its own dot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedvitals.analysis.traffic import TELEMETRY
from fedvitals.diagnosis.cases import Case, severity_rank
from fedvitals.errors import ConfigError
from fedvitals.records import is_client, natural
from fedvitals.store.marks import marks
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.spans import groups_of_spans
from fedvitals.store.read.transfers import Message, messages_of_round
from fedvitals.time_parts import SERVER
from fedvitals.views.cases import case_key, cases_of, failures_by_client

KINDS = {"hierarchical": "tree", "ring_stars": "tree", "clustered": "clusters", "rings": "rings", "ring": "rings"}
DOTS = {"tree": 200}  # nodes with their own dot; with more, the healthy ones are only counted
MOST_DOTS = 1500  # for other pictures than trees, whose leaves are in one line
ILL = 120  # of these, the most unhealthy ones
HEALTHS = ("critical", "warning", "note", "failed", "ok", "absent")  # the worst first
AMOUNTS = ("bytes", "raw_bytes", "messages", "share")  # amounts of an edge, after its two ends
SHARED = 20  # changes of the groups that are listed


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node of the picture, or several shown as one."""

    name: str
    role: str  # «server», «group» (an edge, cluster or ring), «client», «clients» (several as one)
    group: str | None
    health: str  # see HEALTHS
    issue: str | None  # what is wrong, in words
    key: str | None  # of that case
    sent: float
    received: float
    present: bool  # in this round
    count: int = 1  # clients that it represents
    members: tuple[str, ...] = ()  # some of them


@dataclass(frozen=True, slots=True)
class PlacedEdge:
    """The bytes sent from one node to another."""

    sender: str
    receiver: str
    bytes: float
    raw_bytes: float
    messages: int
    share: float  # of the round's bytes


@dataclass(frozen=True, slots=True)
class KindBytes:
    """Bytes of one kind of message."""

    kind: str
    bytes: float
    messages: int


@dataclass(frozen=True, slots=True)
class TopologyPage:
    """Everything that the page of the topology shows."""

    run: str
    topology: str | None  # as named by the run
    kind: str  # «star», «clusters», «tree», «rings»: how it is drawn
    round: int
    first: int
    last: int
    nodes: tuple[PlacedNode, ...]
    edges: tuple[PlacedEdge, ...]
    clients: int  # in the run
    took_part: int
    groups: int
    joined: bool  # whether healthy clients are joined
    bytes: float
    kinds: tuple[KindBytes, ...]
    changed: tuple[int, ...]  # rounds in which the groups changed
    has_transfers: bool  # whether any transfer of this round was recorded


def topology_page(reader: Reader, run: str, number: int | None = None, *, most: int | None = None) -> TopologyPage:
    """Return the federation as it was in a round, else in the newest."""
    rounds = reader.history(run).rounds()
    if not rounds:
        raise ConfigError(f"The run {run} has no round yet.")
    at = rounds[-1] if number is None else number
    if at not in set(rounds):
        raise ConfigError(f"The run {run} has no round {at}. It has rounds {rounds[0]} to {rounds[-1]}.")
    described = queries.get_run(reader, run)
    messages = messages_of_round(reader, run, at)
    groups, changed = _groups(reader, run, at)
    named = {node for node in reader.history(run).nodes() if node != SERVER}
    nodes = _nodes(reader, run, at, messages, groups, named)
    # Telemetry bypasses the edges on its way to the server.
    edges = _edges(message for message in messages if message[2] != TELEMETRY)
    kind = _kind(described.topology, messages, groups)
    joined = len(nodes) > (DOTS.get(kind, MOST_DOTS) if most is None else most)
    if joined:
        nodes, edges = _join(nodes, edges)
    clients = [node for node in named if is_client(node)]
    return TopologyPage(
        run=run,
        topology=described.topology,
        kind=kind,
        round=at,
        first=rounds[0],
        last=rounds[-1],
        nodes=tuple(nodes),
        edges=tuple(edges),
        clients=len(clients),
        took_part=sum(node.count for node in nodes if node.role in ("client", "clients") and node.present),
        groups=len({node.name for node in nodes if node.role == "group"}),
        joined=joined,
        bytes=sum(message[3] for message in messages),
        kinds=_kinds(messages),
        changed=tuple(changed[-SHARED:]),
        has_transfers=bool(messages),
    )


def _groups(reader: Reader, run: str, number: int) -> tuple[dict[str, list[str]], list[int]]:
    """Return the members of each group in a round, as reported, and the rounds in which the groups changed."""
    groups: dict[str, list[str]] = {}
    changed = []
    for event in reader.history(run).events("groups"):
        when = event.where.round
        if when is not None:
            changed.append(when)
            if when <= number:
                groups = {
                    str(group): [str(n) for n in nodes]
                    for group, nodes in event.data.items()
                    if isinstance(nodes, list | tuple)
                }
    if not groups:  # a host that reports no groups may still name each client's
        members = groups_of_spans(reader, run, number)
        for group, node in sorted(members, key=lambda row: natural(row[1])):
            if is_client(node):
                groups.setdefault(group, []).append(node)
    return dict(sorted(groups.items(), key=lambda item: natural(item[0]))), changed


def _kind(topology: str | None, messages: Iterable[Message], groups: Mapping[str, Any]) -> str:
    if topology in KINDS:
        return KINDS[topology]
    if any(is_client(sender) and is_client(receiver) for sender, receiver, *_ in messages) and groups:
        return "rings"
    if any(receiver in groups or sender in groups for sender, receiver, *_ in messages):
        return "tree"
    return "clusters" if groups else "star"


def _nodes(
    reader: Reader,
    run: str,
    number: int,
    messages: Iterable[Message],
    groups: Mapping[str, list[str]],
    named: set[str],
) -> list[PlacedNode]:
    sent: dict[str, float] = {}
    received: dict[str, float] = {}
    for sender, receiver, _, size, *_ in messages:
        sent[sender] = sent.get(sender, 0.0) + size
        received[receiver] = received.get(receiver, 0.0) + size
    group_of = {node: group for group, members in groups.items() for node in members}
    there = _present(reader, run, number) | sent.keys() | received.keys()
    failed = failures_by_client(reader, run, number)
    worst = _worst(reader, run, number)
    clients = {node for node in named if is_client(node)} | {node for node in there if is_client(node)} | set(group_of)
    between = {*groups, *(node for node in there if not is_client(node) and node != SERVER)}
    place = {node: at for members in groups.values() for at, node in enumerate(members)}
    by_group = sorted(clients, key=lambda node: (natural(group_of.get(node, "")), place.get(node, -1), natural(node)))
    placed = []
    for node in [SERVER, *sorted(between, key=natural), *by_group]:
        role = "server" if node == SERVER else "group" if node in between else "client"
        case, present = worst.get(node), role != "client" or node in there
        placed.append(
            PlacedNode(
                name=node,
                role=role,
                group=group_of.get(node),
                health=_health(case, failed=node in failed, present=present),
                issue=case.issue_entry.title if case else None,
                key=case_key(case) if case else None,
                sent=sent.get(node, 0.0),
                received=received.get(node, 0.0),
                present=present,
            )
        )
    return placed


def _health(case: Case | None, *, failed: bool, present: bool) -> str:
    if case is not None:
        return case.newest.severity
    return "failed" if failed else "ok" if present else "absent"


def _present(reader: Reader, run: str, number: int) -> set[str]:
    """Return the nodes that trained or sent an update in a round."""
    history = reader.history(run)
    return {*history.latest("steps", number), *history.latest("update.norm", number)}


def _worst(reader: Reader, run: str, number: int) -> dict[str, Case]:
    """Return the worst case of each node or group that was open in a round, without muted ones."""
    muted = {mark.target for mark in marks(reader, run) if mark.kind == "muted"}
    worst: dict[str, Case] = {}
    for case in cases_of(reader, run, number):
        node = case.node or case.group
        if node is None or not case.still_there or case_key(case) in muted:
            continue
        if node not in worst or severity_rank(case.newest.severity) < severity_rank(worst[node].newest.severity):
            worst[node] = case
    return worst


def _edges(messages: Iterable[Message]) -> list[PlacedEdge]:
    """Return one edge per pair and direction, the largest first."""
    sums: dict[tuple[str, str], tuple[float, float, int]] = {}
    for sender, receiver, _, size, raw, count in messages:
        known = sums.get((sender, receiver), (0.0, 0.0, 0))
        sums[sender, receiver] = known[0] + size, known[1] + raw, known[2] + count
    whole = sum(size for size, _, _ in sums.values()) or 1.0
    edges = [PlacedEdge(*pair, size, raw, count, size / whole) for pair, (size, raw, count) in sums.items()]
    return sorted(edges, key=lambda edge: -edge.bytes)


def _kinds(messages: Iterable[Message]) -> tuple[KindBytes, ...]:
    sums: dict[str, tuple[float, int]] = {}
    for _, _, kind, size, _, count in messages:
        known = sums.get(kind, (0.0, 0))
        sums[kind] = known[0] + size, known[1] + count
    return tuple(KindBytes(kind, *sums[kind]) for kind in sorted(sums, key=lambda kind: -sums[kind][0]))


def _join(nodes: list[PlacedNode], edges: list[PlacedEdge]) -> tuple[list[PlacedNode], list[PlacedEdge]]:
    """Return healthy and absent clients as one node per group; unhealthy ones unchanged."""
    ill = [node for node in nodes if node.role == "client" and node.health not in ("ok", "absent")]
    ill.sort(key=lambda node: HEALTHS.index(node.health))
    alone = {node.name for node in ill[:ILL]}
    kept = [node for node in nodes if node.role != "client" or node.name in alone]
    together: dict[tuple[str | None, str, bool], list[PlacedNode]] = {}
    for node in nodes:
        if node.role == "client" and node.name not in alone:
            together.setdefault((node.group, node.health, node.present), []).append(node)
    stands_for: dict[str, str] = {}
    for (group, health, _), members in together.items():
        words = {"ok": "without a finding", "absent": "not in this round"}.get(health, health)
        name = f"{len(members)} clients {f'of {group} ' if group else ''}{words}"
        stands_for |= {node.name: name for node in members}
        kept.append(
            replace(
                members[0],
                name=name,
                role="clients",
                issue=None,
                key=None,
                sent=sum(node.sent for node in members),
                received=sum(node.received for node in members),
                count=len(members),
                members=tuple(node.name for node in members[:10]),
            )
        )
    sums: dict[tuple[str, str], PlacedEdge] = {}
    for edge in edges:
        pair = stands_for.get(edge.sender, edge.sender), stands_for.get(edge.receiver, edge.receiver)
        amounts = [getattr(edge, name) for name in AMOUNTS]
        if pair in sums:
            amounts = [getattr(sums[pair], name) + amount for name, amount in zip(AMOUNTS, amounts, strict=True)]
        sums[pair] = PlacedEdge(*pair, *amounts)
    return kept, sorted(sums.values(), key=lambda edge: -edge.bytes)
