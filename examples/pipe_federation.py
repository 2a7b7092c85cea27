# SPDX-License-Identifier: Apache-2.0
"""A federation over pipes, watched by fedvitals: how to bring a host of your own, step by step in docs/hosts.md.

What it trains is a script of `fedvitals.testing.check_host`, which this file calls if you run it.
"""

import multiprocessing
import time
from multiprocessing.connection import wait

import fedvitals as fv
from fedvitals.testing import ScriptedError, check_host

FIRST, OTHERS, TELEMETRY_BYTES = 60.0, 3.0, 32_768  # seconds of waiting for the first answer, and for each other


def client(script, node, pipe):
    """The process of a client: answer each request with weights (None: it failed) and telemetry."""
    while (request := pipe.recv()) is not None:
        round_index, weights, worker = request
        trained = None
        try:
            with worker.client(node):  # (1) the client measures itself; with a model and a loss, each step of it
                trained = script.train(round_index, node, weights)
        except ScriptedError:
            pass
        payload = script.telemetry(round_index, node, worker.payload(most=TELEMETRY_BYTES))
        if script.answers(round_index, node):
            pipe.send((round_index, trained, payload))


class Server:
    """Asks clients, averages their answers, and reports both to a monitor."""

    def __init__(self, script, monitor, pipes):
        self.script, self.monitor, self.pipes = script, monitor, pipes
        self.nodes = {pipe: node for node, pipe in pipes.items()}
        self.asked = {}  # who owes an answer: since which round and when, and with which weights it began

    def round(self, round_index, weights):
        host, barrier = self.monitor.host, self.script.slow is None or round_index == self.script.rounds - 1
        host.round_begin(round_index)  # (2) what follows belongs to this round
        self.script.in_round(round_index, self.monitor.close)
        for node in self.pipes.keys() - self.asked.keys():
            self.asked[node] = (round_index, time.time(), weights)
            self.pipes[node].send((round_index, weights, host.for_worker()))
            host.transfer("server", node, sum(values.nbytes for values in weights.values()), kind="model")
        answers = []
        while len(self.asked) > (0 if barrier else 1) and (ready := wait(self.nodes, OTHERS if answers else FIRST)):
            answers += [answer for pipe in ready if (answer := self.receive(round_index, self.nodes[pipe]))]
        for node in [*self.asked] if barrier else ():  # (6) who does not answer is counted
            del self.asked[node]
            host.event("warning", "update.late", f"{node} did not answer within {OTHERS} s.", node=node)
        host.round_end(round_index)
        return self.script.average(answers) if answers else weights

    def receive(self, round_index, node):
        answered, trained, payload = self.pipes[node].recv()  # (3) whose answer it is, the pipe says, not the client
        asked_in, sent, weights = self.asked.get(node, (None, 0.0, {}))
        if answered != asked_in:
            self.monitor.host.event("info", "client.answered_late", f"{node} answered too late.", node=node)
            return None
        del self.asked[node]
        self.monitor.exchange(node, sent, sent, (now := time.time()), now)
        self.monitor.host.absorb(payload, node)  # (4) believed about its sender alone
        if trained is None:
            self.monitor.host.event("error", "client.failed", f"{node} failed.", node=node)
            return None
        if asked_in != round_index:  # (5) an update of an older model is marked as such
            self.monitor.log({"update.staleness": round_index - asked_in}, node=node)
        self.monitor.updates(round_index, {node: {name: trained[name] - weights[name] for name in weights}})
        self.script.took(round_index, node)
        return trained


class PipeHost:
    """Lets `check_host` drive this federation."""

    name, cannot = "pipes", {}

    def client_names(self, count):
        return [f"site-{i}" for i in range(count)]

    def run(self, script, store):
        context, pipes = multiprocessing.get_context("fork"), {}
        for node in script.clients:
            pipes[node], theirs = context.Pipe()
            context.Process(target=client, args=(script, node, theirs), daemon=True).start()
        with fv.Monitor(store, run=script.name, host=self.name, machine=False) as monitor:
            server, weights = Server(script, monitor, pipes), script.model()
            for round_index in range(script.rounds):
                weights = server.round(round_index, weights)
            script.at_end(monitor.close)  # (7) closing ends the run; a second time does nothing
        for pipe in pipes.values():
            pipe.send(None)


if __name__ == "__main__":
    print("\n".join(f"{check}: {outcome}" for check, outcome in check_host(PipeHost()).items()))  # noqa: T201
