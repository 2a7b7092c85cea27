# SPDX-License-Identifier: Apache-2.0
"""Loops on the grid without a barrier: replies of earlier rounds are the app's, and say how old they are."""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import fedvitals as fv
from support.flower.federation import HandGrid, client_app, flower_run, model, node_of, numbers, watched, with_mod

ROUNDS, AGE, SLOW = 9, 2, 102


def federate(app, monitor=None):
    """Rounds in which a slow node's replies come so many rounds later; gives the model."""
    grid, held = HandGrid(app, 3), {}

    def fate(request, reply):
        if node_of(request) != str(SLOW):
            return reply
        held[request.metadata.message_id] = (request.content["config"]["server-round"] + AGE, reply)
        return None

    grid.fate = fate
    if monitor is not None:
        fv.flower.attach(grid, monitor)
    arrays, asked = model(), {}
    for number in range(1, ROUNDS + 1):
        idle = [node for node in grid.get_node_ids() if node not in asked.values()]
        content = {"arrays": arrays, "config": ConfigRecord({"server-round": number})}
        requests = [Message(RecordDict(dict(content)), message_type="train", dst_node_id=node) for node in idle]
        asked |= dict(zip(grid.push_messages(requests), idle, strict=True))
        for key in [key for key, (due, _) in held.items() if due == number]:
            grid._ready[key] = held.pop(key)[1]
        replies = grid.pull_messages([*asked])
        for reply in replies:
            asked.pop(reply.metadata.reply_to_message_id)
            assert [*reply.content] == ["arrays", "metrics"]
        means = {
            name: np.mean([reply.content["arrays"][name].numpy() for reply in replies], axis=0, dtype=np.float32)
            for name in arrays
        }
        arrays = ArrayRecord({name: Array(values) for name, values in means.items()})
    return arrays


def test_the_app_gets_every_reply_and_the_model_is_the_same_to_the_last_bit():
    with flower_run():
        plain = federate(client_app())
    with watched() as (monitor, sink), flower_run():
        assert numbers(federate(with_mod(), monitor)) == numbers(plain)
    stale = {(m.where.node, m.where.round): m.value for m in sink.metrics("update.staleness")}
    assert stale == {(str(SLOW), number): AGE for number in (3, 6, 9)}
    assert [m.where.round for m in sink.metrics("update.norm", node=str(SLOW))] == [3, 6, 9]
    late = [(e.where.node, e.where.round) for e in sink.events("update.late")]
    assert late == [(str(SLOW), 1)]  # before the first of its replies was taken, nothing said that nobody waits
