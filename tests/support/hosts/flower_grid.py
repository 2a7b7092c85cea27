# SPDX-License-Identifier: Apache-2.0
"""Flower runs the federations of `check_host`: its strategy, messages and ClientApp, on a grid without processes.

Federations without a barrier are a loop of one's own on the grid, since Flower's strategies all wait.
"""

import functools

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.hosts.flower.reply_envelope import KEY
from fedvitals_studies.flower.process_identity import flower_run
from support.flower.federation import FIRST, RUNS, HandGrid, Late, client_app, node_of


def arrays_of(weights):
    return ArrayRecord({name: Array(values) for name, values in weights.items()})


def weights_of(content):
    return {name: array.numpy() for name, array in content["arrays"].items()}


def round_of(request):
    return request.content["config"]["server-round"] - 1


def train(script, message, context):
    weights = script.train(round_of(message), str(context.node_id), weights_of(message.content))
    content = {"arrays": arrays_of(weights), "metrics": MetricRecord({"num-examples": 20})}
    return Message(RecordDict(content), reply_to=message)


class ScriptedStrategy(FedAvg):
    """Calls the script as the rounds go by."""

    def __init__(self, script, monitor):
        super().__init__(fraction_evaluate=0.0)
        self.script, self.monitor = script, monitor

    def configure_train(self, server_round, *args, **more):
        self.script.in_round(server_round - 1, self.monitor.close)
        return super().configure_train(server_round, *args, **more)

    def aggregate_train(self, server_round, replies):
        replies = [*replies]
        for reply in replies:
            if reply.has_content():
                self.script.took(server_round - 1, str(reply.metadata.src_node_id))
        return super().aggregate_train(server_round, replies)


class FlowerHost:
    name, cannot = "flower", {}

    def client_names(self, count):
        return [str(FIRST + i) for i in range(count)]

    def run(self, script, store):
        app = client_app(fv.flower.client_mod(), train=functools.partial(train, script))
        grid = HandGrid(app, len(script.clients), fate=functools.partial(self.fate, script), run_id=next(RUNS))
        with fv.Monitor(store, run=script.name, machine=False) as monitor, flower_run(grid.run_id):
            if script.slow is None:
                strategy = fv.flower.attach(ScriptedStrategy(script, monitor), monitor)
                strategy.start(grid, arrays_of(script.model()), num_rounds=script.rounds)
            else:
                self.run_without_barrier(script, grid, monitor)
            script.at_end(monitor.close)

    def fate(self, script, request, reply):
        """What becomes of a client's reply."""
        round_index, node = round_of(request), node_of(request)
        if reply.has_content() and KEY in reply.content:
            own = reply.content[KEY]
            payload = script.telemetry(round_index, node, own["payload"])
            reply.content[KEY] = ConfigRecord({**own, "payload": payload})
        trouble = script.trouble(round_index, node)
        return None if trouble == "lost" else Late(reply) if trouble == "late" else reply

    def run_without_barrier(self, script, grid, monitor):
        held = {}

        def fate(request, reply):
            if node_of(request) == script.slow and round_of(request) == 0:
                held[request.metadata.message_id] = reply
                return None
            return reply

        grid.fate = fate
        fv.flower.attach(grid, monitor)
        weights, asked = script.model(), {}
        for round_index in range(script.rounds):
            idle = [node for node in grid.get_node_ids() if node not in asked.values()]
            content = {"arrays": arrays_of(weights), "config": ConfigRecord({"server-round": round_index + 1})}
            requests = [Message(RecordDict(dict(content)), message_type="train", dst_node_id=node) for node in idle]
            asked |= dict(zip(grid.push_messages(requests), idle, strict=True))
            script.in_round(round_index, monitor.close)
            if round_index == script.rounds - 1:
                grid._ready |= held
            taken = []
            for reply in grid.pull_messages([*asked]):
                script.took(round_index, str(asked.pop(reply.metadata.reply_to_message_id)))
                taken.append(weights_of(reply.content))
            weights = script.average(taken)
