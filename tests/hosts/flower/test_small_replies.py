# SPDX-License-Identifier: Apache-2.0
"""A large model whose reply is small, as with adapters: details are left out, and no client is accused of that."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch import nn

import fedvitals as fv
from fedvitals.hosts.telemetry_budget import SMALLEST_BUDGET
from fedvitals.records import Finding, LayerStats, Metric
from support.flower.federation import RUNS, client_app, federate, training, watched


def trained(blocks):
    def train(message, context):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(blocks)])
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with fv.watch(model, optimizer):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
        return training(message, context)

    return train


def observed(blocks, probes):
    app = client_app(fv.flower.client_mod(privacy=4, probes=probes), train=trained(blocks))
    with watched(detectors="standard", privacy=4) as (monitor, sink):
        federate(FedAvg(), app, monitor, nodes=2, rounds=2, run_id=next(RUNS))
    return sink


@pytest.mark.parametrize(("blocks", "probes"), [(40, "deep"), (100, "standard")])
def test_a_large_model_with_a_small_reply_keeps_all_its_numbers(blocks, probes):
    """160 tensors with the preset «deep», 400 with «standard»: only layer statistics find no room in 32 KiB."""
    large, small = observed(blocks, probes), observed(1, probes)
    for node in ("100", "101"):
        of_small = {(m.name, m.where.round) for m in small.of(Metric, node=node)}
        assert {(m.name, m.where.round) for m in large.of(Metric, node=node)} >= of_small
        (first, second) = large.events("worker.thinned", node=node)
        assert (first.where.round, second.where.round, first.level) == (1, 2, "info")
        assert "gradient" in first.message
        assert "found no room" not in first.message
    assert large.of(LayerStats, "weight", node="100"), "a smaller family stays"
    assert not small.events("worker.thinned")
    assert not large.events("worker.lost")
    assert not large.events("telemetry.refused")
    assert not large.of(Finding, "TELEMETRY_LOST")


def test_a_client_counts_on_the_request_as_the_server_does():
    """1 % of the larger of request and reply: a reply of a few bytes to a large model may carry more than 32 KiB."""
    sizes = []

    def train(message, context):
        with fv.watch(nn.Linear(2, 1)) as observer:
            for i in range(150):
                observer.event("info", "user.remark", f"{i} " + np.random.default_rng(i).bytes(200).hex())
        small = ArrayRecord({"adapter": Array(np.zeros(2, np.float32))})
        content = RecordDict({"arrays": small, "metrics": MetricRecord({"num-examples": 1})})
        message.content["arrays"] = small  # as a mod that unpacks a request in place would
        return Message(content, reply_to=message)

    def fate(request, reply):
        if reply.has_content() and "fedvitals" in reply.content:
            sizes.append(len(reply.content["fedvitals"]["payload"]))
        return reply

    large = ArrayRecord({"w": Array(np.zeros(1_500_000, np.float32))})
    with watched(privacy=4) as (monitor, sink):
        app = client_app(fv.flower.client_mod(privacy=4), train=train)
        federate(FedAvg(fraction_evaluate=0.0), app, monitor, rounds=1, arrays=large, fate=fate, run_id=next(RUNS))
    assert max(sizes) > SMALLEST_BUDGET
    assert not sink.events("worker.lost")
    assert not sink.events("telemetry.refused")
    assert len(sink.events("user.remark", node="101")) == 150
