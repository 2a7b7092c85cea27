# SPDX-License-Identifier: Apache-2.0
"""What the tests of workers run in child processes, where spawned ones can import it; and the same without workers."""

import os
import signal
import time

import torch
from torch.nn import functional

from fedvitals.probes.gradients import gradients
from fedvitals.probes.presets import Planned, Preset
from fedvitals.probes.weights import weights
from fedvitals.schedule import always
from support.models import make, make_data, train

# Nothing in it depends on how long things take, so that two runs give the same.
PROBES = Preset("timeless", (Planned(gradients, always), Planned(weights)), fit_percent=None)
STEPS = 4


def seed_of(node: str) -> int:
    return int(node.removeprefix("c"))


def local_training(observer, node, state, number=None, model_name="cnn", before_step=lambda step: None):
    """One client on its own data; the model after it. `observer` is a monitor, a worker or None."""
    torch.manual_seed(0)
    model = make(model_name)
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = make_data(seed=seed_of(node))
    if observer is None:
        train(model, optimizer, data, STEPS)
        return model
    rounds = {} if number is None else {"round_index": number}
    group = "edge-0" if seed_of(node) < 2 else None
    with observer.client(node, model, data=data, loss=functional.cross_entropy, group=group, **rounds):
        train(model, optimizer, data, STEPS, before_step)
        observer.log(seed=seed_of(node))
        observer.transfer(node, "server", 1000 + seed_of(node))
    return model


def numpy_state(model):
    """Torch would send tensors through shared memory, which outlives a killed child."""
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def torch_state(state):
    return {name: torch.as_tensor(array) for name, array in state.items()}


def task(worker, node, state, number=None):
    torch.set_num_threads(1)
    model = local_training(worker, node, torch_state(state), number)
    return node, numpy_state(model), b"" if worker is None else worker.payload()


def into_pipe(pipe, *arguments):
    pipe.send(task(*arguments))
    pipe.close()


def deadly_task(worker, node, state, how):
    """Dies in the midst of its client's training."""

    def die(step):
        if step == 2:
            if how == "exit":
                os._exit(1)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10)

    local_training(worker, node, torch_state(state), before_step=die)


def failing_task(worker, node, state):
    def fail(step):
        if step == 2:
            raise ValueError("out of patience")

    try:
        local_training(worker, node, torch_state(state), before_step=fail)
    except ValueError:
        return worker.payload()


_held = []


def hold(worker):
    """For a pool's initializer: one observer per process."""
    _held.append(worker)


def held_task(node, state, number):
    return task(_held[0], node, state, number)


def own_probe(view):
    return {"total": sum(float(p.detach().sum()) for p in view.parameters)}


def average(states):
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}
