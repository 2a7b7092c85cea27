# SPDX-License-Identifier: Apache-2.0
"""A federation as a plain loop: clients train copies of a model, and the server takes their mean."""

import copy

import torch


def train_rounds(monitor, model, data, *, rounds, loss, optimizer, batch=None, passes=1):
    """Train watched rounds. `data`: (x, y) of each client; `optimizer`: from parameters; `batch`: all, by default."""
    for number in range(rounds):
        trained = []
        with monitor.round(number, model):
            for client, (x, y) in enumerate(data):
                local = copy.deepcopy(model)
                steps = optimizer(local.parameters())
                with monitor.client(f"c{client}", local, data=(x, y), loss=loss):
                    for part in [*torch.arange(len(x)).split(batch or len(x))] * passes:
                        steps.zero_grad()
                        loss(local(x[part]), y[part]).backward()
                        steps.step()
                trained.append(local.state_dict())
            mean = {name: sum(state[name] for state in trained) / len(trained) for name in model.state_dict()}
            model.load_state_dict(mean)
