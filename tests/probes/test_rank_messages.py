# SPDX-License-Identifier: Apache-2.0
"""What is in the store of torch.distributed: bounded, and no harm if it is not ours."""

import os

import msgspec
import numpy as np
import pytest
from torch import distributed

from fedvitals.probes import ranks
from fedvitals.probes.ranks import RankGroup, RankMark, RankMessage

ROWS, TOTALS, TIMES = [np.ones((3, 9))], [np.ones(2)], (0.1, 0.2, 0.3)


@pytest.fixture
def two(monkeypatch):
    """The two processes of a client, in this one: a store and their groups."""
    monkeypatch.setattr(ranks, "PATIENCE", 0.05)
    store = distributed.HashStore()
    groups = []
    for rank in range(2):
        monkeypatch.setattr(ranks.distributed, "get_rank", lambda rank=rank: rank)
        groups.append(RankGroup((0, 1), store, sharded=True))
    return store, *groups


def train(group, steps=5):
    group.begin()
    return group.gather(steps, TIMES, ROWS, TOTALS)


def test_messages_that_nobody_reads_do_not_fill_the_store(two):
    store, _, second = two
    for _ in range(50):
        train(second)
    assert store.num_keys() <= ranks.UNREAD + 2


def test_a_monitor_that_begins_late_gets_the_next_message(two):
    _, first, second = two
    for _ in range(50):
        train(second)
    for _ in range(2):
        first.begin()
        train(second)
        gathered = first.gather(5, TIMES, ROWS, TOTALS)
        assert gathered.totals[0].tolist() == [2.0, 2.0]
        assert not gathered.lost
        assert not gathered.unwatched


GOOD = RankMessage(5, TIMES, [((3, 9), ROWS[0].tobytes()), ((2,), TOTALS[0].tobytes())])
MESSAGES = {
    "bytes": b"\xc1 not ours",
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "another type": msgspec.msgpack.encode({"steps": 5}),
    "other sizes": msgspec.msgpack.encode(RankMessage(5, TIMES, [((10**12,), b""), ((2,), b"")])),
    "negative sizes": msgspec.msgpack.encode(RankMessage(5, TIMES, [((-3, -9), ROWS[0].tobytes())])),
    "fewer arrays": msgspec.msgpack.encode(RankMessage(5, TIMES, GOOD.arrays[:1])),
    "other times": msgspec.msgpack.encode(RankMessage(5, (0.1,), GOOD.arrays)),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_is_none_counts_as_of_a_process_that_is_not_watched(two, name):
    store, first, second = two
    first.begin()
    second.begin()
    store.set(second._key(1, 1), MESSAGES[name])
    gathered = first.gather(5, TIMES, ROWS, TOTALS)
    assert gathered.unwatched == [1]
    assert gathered.totals[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("mark", [b"\xc1", msgspec.msgpack.encode(RankMark(2**40, "here\x1b[31m", 2**63, ""))])
def test_a_mark_that_is_none_costs_at_most_the_patience(two, mark):
    store, first, second = two
    first.begin()
    store.set(f"{second._prefix}/begun/1", mark)
    gathered = first.gather(5, TIMES, ROWS, TOTALS)
    assert [*gathered.unwatched, *gathered.lost] == [1]
    assert all(own.words.isprintable() for own in gathered.lost.values())


def test_the_number_of_no_process_is_not_asked_for():
    own = RankMark.own(1)
    assert not RankMark(1, own.host, 2**63, own.numbering).is_gone
    assert not RankMark(1, own.host, os.getpid(), own.numbering).is_gone
