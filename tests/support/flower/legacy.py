# SPDX-License-Identifier: Apache-2.0
"""An app of Flower's older API: NumPyClients and a FedAvg that adds up in a fixed order."""

import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server.strategy import FedAvg

from support.flower.federation import LAYERS, target

NODES = {"100", "101", "102", "103"}


class Moving(NumPyClient):
    """Goes a part of the way to a target of its own."""

    def __init__(self, node, ill=None):
        self.node, self.ill = node, ill

    def fit(self, parameters, config):
        if self.ill == "raises" and config["round"] == 2:
            raise LookupError("not to be told")
        learnt = [a + np.float32(0.3) * (target(self.node, str(i), a.shape) - a) for i, a in enumerate(parameters)]
        if self.ill == "nan" and config["round"] == 2:
            learnt[1][0] = np.nan
        return learnt, 20 + self.node % 5, {"train_loss": float(np.abs(learnt[0]).mean())}

    def evaluate(self, parameters, config):
        return float(np.abs(parameters[0]).mean()), 20, {"accuracy": 0.5}


def client_app(*mods, ill=None):
    def client_fn(context):
        return Moving(context.node_id, ill if context.node_id == 102 else None).to_client()

    return ClientApp(client_fn=client_fn, mods=[*mods])


class Ordered(FedAvg):
    """Replies come in the order in which threads end: sorted, sums are the same each time."""

    def __init__(self, **more):
        first = [np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(LAYERS.values())]
        super().__init__(
            initial_parameters=ndarrays_to_parameters(first),
            on_fit_config_fn=lambda number: {"round": number},
            evaluate_fn=lambda number, arrays, _: (float(np.abs(arrays[0]).sum()), {"accuracy": 0.1 * number}),
            **more,
        )
        self.models, self.replies = [], []

    def aggregate_fit(self, server_round, results, failures):
        results = sorted(results, key=lambda pair: pair[0].node_id)
        self.replies.append([(p.node_id, r.num_examples, r.metrics, r.parameters.tensors) for p, r in results])
        found = super().aggregate_fit(server_round, results, failures)
        self.models.append(None if found[0] is None else found[0].tensors)
        return found
