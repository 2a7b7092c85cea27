# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch loop runs the federations of `check_host`."""

import copy

import torch

import fedvitals as fv
from fedvitals.testing import ScriptedError


class Dense(torch.nn.Module):
    """The script's weights as parameters, which training moves to those of the script."""

    def __init__(self, weights):
        super().__init__()
        self.dense, self.head = torch.nn.Linear(6, 4), torch.nn.Linear(4, 3, bias=False)
        self.load(weights)

    def load(self, weights):
        shaped = {name: torch.from_numpy(values.T if values.ndim == 2 else values) for name, values in weights.items()}
        self.load_state_dict(shaped)

    def weights(self):
        state = {name: values.numpy() for name, values in self.state_dict().items()}
        return {name: (values.T if values.ndim == 2 else values).copy() for name, values in state.items()}


class LoopHost:
    """Clients train one after the other; whose update is late or lost, the loop itself knows and says."""

    name = "torch"
    cannot = {"hostile telemetry": "clients train in the process of the server: none sends telemetry that could lie"}

    def client_names(self, count):
        return [f"c{i}" for i in range(count)]

    def run(self, script, store):
        with self.monitor(script, store) as monitor:
            self.federate(script, monitor)
            script.at_end(self.close_of(monitor))

    def monitor(self, script, store):
        return fv.Monitor(store, run=script.name, machine=False)

    def close_of(self, monitor):
        return monitor.close

    def federate(self, script, monitor):
        shared, owed = Dense(script.model()), {}
        for round_index in range(script.rounds):
            with monitor.round(round_index, shared):
                script.in_round(round_index, self.close_of(monitor))
                taken = {}
                for node in script.clients:
                    if node == script.slow:
                        if round_index == 0:
                            owed[node] = script.train(0, node, shared.weights())
                        elif round_index == script.rounds - 1:
                            taken[node] = owed.pop(node)
                            self.mark_stale(monitor, round_index, node)
                    elif (trained := self.train(script, monitor, round_index, node, shared)) is not None:
                        taken[node] = trained
                for node, weights in taken.items():
                    before = shared.weights()
                    update = {name: (weights[name] - before[name]).T for name in before}
                    monitor.updates(round_index, {node: update})
                    script.took(round_index, node)
                shared.load(script.average(taken.values()))

    def mark_stale(self, monitor, round_index, node):
        monitor.log({"update.staleness": round_index}, node=node)

    def train(self, script, monitor, round_index, node, shared):
        """Return a client's weights; None if nothing of it arrives."""
        trouble = script.trouble(round_index, node)
        if trouble in ("late", "lost"):
            monitor.host.event("warning", f"update.{trouble}", f"{node}'s update is {trouble}.", node=node)
            return None
        local = copy.deepcopy(shared)
        try:
            with monitor.client(node, local):
                weights = script.train(round_index, node, shared.weights())
                local.load(weights)
        except ScriptedError:
            return None
        return weights
