# SPDX-License-Identifier: Apache-2.0
"""A small federation with low-rank adapters in a plain loop, for tests of what is measured and shown of them."""

import copy

import torch
from torch import nn

from fedvitals.lab.adapters import LoraLinear


def only_trains(model, *ends):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(ends))
    return model


def lora_model(rank=4):
    torch.manual_seed(0)
    layers = [LoraLinear(nn.Linear(20, 30), rank, 2.0), nn.ReLU(), LoraLinear(nn.Linear(30, 16), rank, 2.0)]
    return only_trains(nn.Sequential(*layers), "lora_A.weight", "lora_B.weight")


def federate(monitor, model, rounds=2, ranks=(4, 4, 4), aggregate=None, scales=None, stepped=""):
    """Train clients on random targets; A and B are averaged with zeros for what a client of a lower rank lacks.

    `stepped`: how the names of the parameters begin that optimisers have. Returns the clients' last states.
    """
    generator = torch.Generator().manual_seed(1)
    states = []
    for number in range(rounds):
        with monitor.round(number, model):
            states = [
                _client(monitor, model, place, rank, generator, None if scales is None else scales[place], stepped)
                for place, rank in enumerate(ranks)
            ]
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.requires_grad:
                        parameter.copy_(torch.stack([state[name] for state in states]).mean(0))
                if aggregate is not None:
                    aggregate(model, states)
    return states


def _client(monitor, model, place, rank, generator, scale, stepped):
    own = copy.deepcopy(model)
    if scale is not None:
        own[0].scale = own[2].scale = scale
    steps = [p for n, p in own.named_parameters() if p.requires_grad and n.startswith(stepped)]
    optimizer = torch.optim.Adam(steps, 0.02)
    with monitor.client(f"c{place}", own):
        for _ in range(3):
            x = torch.randn(8, 20, generator=generator).to(own[0].lora_A.weight.device)
            optimizer.zero_grad()
            (own(x) - x[:, :16] * place).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            for layer in (own[0], own[2]):
                layer.lora_A.weight[rank:] = 0
                layer.lora_B.weight[:, rank:] = 0
    return {name: p.detach().clone() for name, p in own.named_parameters()}
