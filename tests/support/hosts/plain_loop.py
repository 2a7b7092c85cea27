# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch loop runs the federations of `check_host`."""

import contextlib
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
    cannot = {"hostile telemetry": "clients train in the process of the server: none sends telemetry"}  # noqa: RUF012

    def client_names(self, count):
        return [f"c{i}" for i in range(count)]

    def run(self, script, store):
        with self.monitor(script, store) as monitor:
            self.federate(script, monitor)
            script.at_end(self.close_of(monitor))

    def federate(self, script, monitor):
        shared, owed = Dense(script.model()), {}
        for round_index in range(script.rounds):
            with monitor.round(round_index, shared):
                script.in_round(round_index, self.close_of(monitor))
                taken = {}
                for node in script.clients:
                    trouble = script.trouble(round_index, node)
                    if node == script.slow and round_index == 0:
                        owed[node] = script.train(0, node, shared.weights())
                    elif node == script.slow and round_index == script.rounds - 1:
                        taken[node] = owed.pop(node)
                        self.mark_stale(monitor, round_index, node)
                    elif trouble in ("late", "lost"):
                        self.report_missing(monitor, node, trouble)
                    elif node != script.slow:
                        with contextlib.suppress(ScriptedError):
                            taken[node] = self.train(script, monitor, round_index, node, shared)
                before = shared.weights()
                for node, weights in taken.items():
                    update = {name: (weights[name] - before[name]).T for name in before}
                    monitor.updates(round_index, {self.known_as(node, round_index): update})
                    script.took(round_index, node)
                shared.load(script.average(taken.values()))

    def train(self, script, monitor, round_index, node, shared):
        """Return a client's weights."""
        local = copy.deepcopy(shared)
        with monitor.client(self.known_as(node, round_index), local):
            weights = script.train(round_index, node, shared.weights())
            local.load(weights)
        return weights

    # What a host can do wrong, each in a place of its own.

    def monitor(self, script, store):
        return fv.Monitor(store, run=script.name, host=self.name, machine=False)

    def known_as(self, node, round_index):
        return node

    def report_missing(self, monitor, node, trouble):
        monitor.host.event("warning", f"update.{trouble}", f"{node}'s update is {trouble}.", node=node)

    def mark_stale(self, monitor, round_index, node):
        monitor.log({"update.staleness": round_index}, node=node)

    def close_of(self, monitor):
        return monitor.close


class PayloadHost(LoopHost):
    """The same, with telemetry that comes as bytes, as if from other machines."""

    name, cannot = "payloads", {}

    def train(self, script, monitor, round_index, node, shared):
        worker = monitor.host.for_worker()
        try:
            with worker.client(node):
                return script.train(round_index, node, shared.weights())
        finally:
            self.absorb(monitor, node, script.telemetry(round_index, node, worker.payload(most=32_768)))

    def absorb(self, monitor, node, payload):
        monitor.host.absorb(payload, node)
