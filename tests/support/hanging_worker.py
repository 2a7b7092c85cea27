# SPDX-License-Identifier: Apache-2.0
"""A worker process whose client hangs until it is told to go on."""


def hang_here(go_on):
    """Wait for ever, in a place that a stack can name."""
    go_on.wait()


def train(worker, node, go_on, payloads):
    """Train one client, which hangs; the payload goes to the queue."""
    with worker.client(node):
        hang_here(go_on)
    payloads.put(worker.payload())
