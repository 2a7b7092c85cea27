# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: INP001 - a script
"""The federation of the tutorials: for each client a deep copy, a DataLoader and a new optimiser; then the average."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from work import Clock, Work, answer, arguments, commands, train


def one_round(work: Work, model: nn.Module, number: int) -> list[float]:
    states, samples, losses = [], [], []
    for client in range(work.clients):
        local = copy.deepcopy(model)
        data = TensorDataset(*work.client(client))
        # The batches are given, so that everybody trains on the same; drawing and collating cost what they always do.
        loader = DataLoader(data, batch_sampler=work.order(number, client).tolist())
        losses.append(train(local, loader, work.optimizer(local.parameters())))
        states.append(local.state_dict())
        samples.append(len(data))
    total = sum(samples)
    average = {
        name: sum(state[name] * (own / total) for state, own in zip(states, samples, strict=True)) for name in states[0]
    }
    model.load_state_dict(average)
    return losses


if __name__ == "__main__":
    given = arguments()
    torch.set_num_threads(given.threads)
    work = Work(given.folder)
    model = work.model()
    number = 0
    answer(ready=True)
    for command in commands():
        if command == "test":
            answer(accuracy=work.accuracy(model))
        else:
            clock = Clock()
            clock.tell(work.steps, one_round(work, model, number))
            number += 1
