# SPDX-License-Identifier: Apache-2.0
"""A client that Opacus trains with differential privacy: what its noise hides does not leave it by telemetry."""

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fedvitals as fv
from fedvitals.catalog import from_update, level_of
from fedvitals.records import LayerStats, Metric
from support.flower.federation import client_app, federate, watched

opacus = pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def private_training(watch):
    """A `train` of Flower; `watch`: «wrapped», «inner» or «before» the model is made private; None: not watched."""

    def train(message, context):
        torch.manual_seed(context.node_id)
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer, loader = torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(X, Y), batch_size=16)

        def private():
            engine = opacus.PrivacyEngine(secure_mode=False)
            return engine.make_private(
                module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
            )

        def steps(wrapped, stepper, batches):
            for x, y in batches:
                stepper.zero_grad()
                cross_entropy(wrapped(x), y).backward()
                stepper.step()

        if watch == "before":
            with fv.watch(model, optimizer, data=loader, loss=cross_entropy):
                steps(*private())
        else:
            wrapped, stepper, batches = private()
            if watch is None:
                steps(wrapped, stepper, batches)
            else:
                with fv.watch(model if watch == "inner" else wrapped, stepper, data=loader, loss=cross_entropy):
                    steps(wrapped, stepper, batches)
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 64})}
        return Message(RecordDict(content), reply_to=message)

    return train


def run(watch, **settings):
    torch.manual_seed(1)
    app = client_app(fv.flower.client_mod(**settings), train=private_training(watch))
    with watched(ours_may_fail=True) as (monitor, sink):
        reached, _ = federate(
            FedAvg(fraction_evaluate=0.0), app, monitor, nodes=2, arrays=ArrayRecord(network().state_dict())
        )
    own = [record for record in sink.of(Metric) if record.where.node not in (None, "server")]
    return sink, own, {name: array.numpy().tobytes() for name, array in reached.arrays.items()}


@pytest.mark.parametrize("watch", ["wrapped", "inner", "before"])
def test_nothing_that_the_noise_hides_leaves_the_client(watch, caplog):
    sink, own, _ = run(watch)
    # What the server measures of the updates, which have their noise, it knows anyway.
    assert not {metric.name for metric in own if level_of(metric) > 1 and not metric.name.startswith("update.")}
    assert not [record for record in sink.of(LayerStats) if record.where.node != "server" and not from_update(record)]
    assert "Opacus trains this client's model" in caplog.text


def test_who_chooses_a_level_gets_it():
    _, own, _ = run("wrapped", privacy=2)
    assert {"loss", "gradient.norm"} <= {metric.name for metric in own}


def test_training_is_the_same_to_the_last_bit():
    assert run("wrapped")[2] == run(None)[2]
