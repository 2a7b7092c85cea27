# SPDX-License-Identifier: Apache-2.0
"""Nothing of ours may change the training: to the last bit, while it watches and after it is gone."""

import copy
import logging
import multiprocessing
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset

import fedvitals as fv
from fedvitals.testing import MemorySink, tiny_run
from support.hooks import hooks_left
from support.models import MODELS, make, make_data, watched

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

PRESETS = ["light", "standard", "deep"]


class Augmented(Dataset):
    """Noise on every sample, from torch, numpy and Python: whoever draws one number too many is found out."""

    def __init__(self, seed):
        self.x, self.y = make_data(40, seed)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        noise = torch.randn(12) * np.random.rand() * random.random()  # noqa: NPY002
        return self.x[i] + 0.1 * noise, self.y[i]


class OwnStream(Augmented):
    """Noise from generators that the data set holds itself, one of them inside its transform."""

    def __init__(self, seed):
        super().__init__(seed)
        self.numbers = np.random.default_rng(seed)
        self.transform = Transform(seed)

    def __getitem__(self, i):
        return self.transform(self.x[i]) + self.numbers.random(), self.y[i]


class Transform:
    def __init__(self, seed):
        self.stream, self.python = torch.Generator().manual_seed(seed), random.Random(seed)

    def __call__(self, x):
        return x + 0.1 * torch.randn(12, generator=self.stream) * self.python.random()


def epoch(model, optimizer, loader, scaler, *, clip):
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x.float()), y)
        (scaler.scale(loss) if scaler else loss).backward()
        if clip:
            if scaler:
                scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def federation(name, seed, probes, *, dataset=Augmented, clip=True, amp=False, make_optimizer=None):
    """Two rounds of two clients; returns all that may not differ."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    shared = make(name, seed)
    generators = [torch.Generator().manual_seed(seed + i) for i in range(2)]
    loaders = [DataLoader(dataset(seed + i), 8, shuffle=True, generator=g) for i, g in enumerate(generators)]
    monitor = watched(probes)[0] if probes else None
    states = []
    for number in range(2):
        if monitor:
            monitor.host.round_begin(number, shared)
        locals_ = []
        for i, loader in enumerate(loaders):
            model = copy.deepcopy(shared)
            optimizer = (make_optimizer or torch.optim.Adam)(model.parameters(), lr=1e-2)
            scaler = torch.amp.GradScaler("cpu", init_scale=256) if amp else None
            if monitor:
                monitor.host.client_begin(f"c{i}", model, optimizer, loader, loss=functional.cross_entropy)
            epoch(model, optimizer, loader, scaler, clip=clip)
            if monitor:
                monitor.host.client_end(f"c{i}")
            locals_.append(model.state_dict())
            states.append((model.state_dict(), optimizer.state_dict(), [m.training for m in model.modules()]))
        shared.load_state_dict({k: torch.stack([s[k].double() for s in locals_]).mean(0) for k in locals_[0]})
        if monitor:
            monitor.host.round_end(number, shared)
    if monitor:
        monitor.close()
    streams = [torch.get_rng_state(), [g.get_state() for g in generators], random.getstate(), np.random.get_state()]  # noqa: NPY002
    return states, shared.state_dict(), streams


def same(a, b, path="") -> None:
    """Equal to the last bit, all the way down; says where not."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            same(one, other, f"{path}[{i}]")
    else:
        assert a == b, path


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_bit_for_bit(name, seed):
    """Weights, buffers, optimiser state, modes and every random stream, in every preset, with labelled data given."""
    plain = federation(name, seed, None)
    for probes in PRESETS:
        same(federation(name, seed, probes), plain, probes)


@pytest.mark.parametrize("probes", PRESETS)
@pytest.mark.parametrize("name", MODELS)
def test_under_a_scaler(name, probes):
    """The same with a GradScaler and clipping, and with a fused optimiser."""
    for settings in ({"amp": True}, {"amp": True, "clip": False, "make_optimizer": fused_adam}):
        same(federation(name, 3, probes, **settings), federation(name, 3, None, **settings))


def fused_adam(parameters, lr):
    return torch.optim.Adam(parameters, lr=lr, fused=True)


@pytest.mark.parametrize("probes", PRESETS)
def test_streams_that_the_data_set_holds_itself(probes):
    """A data set with generators of its own, also inside its transforms, is read without moving them."""
    same(federation("mlp", 4, probes, dataset=OwnStream), federation("mlp", 4, None, dataset=OwnStream))


def test_nothing_is_made_before_the_first_event(tmp_path):
    """A monitor that sees nothing leaves no file, no thread and no log handler; nor does its close."""
    before = threading.enumerate(), list(logging.getLogger().handlers)
    monitor = fv.Monitor(tmp_path / "runs.db")
    assert (threading.enumerate(), list(logging.getLogger().handlers)) == before
    assert not monitor.findings()
    monitor.close()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_after_close():
    """Threads, log handlers and hooks are as before, whatever was done in between."""
    before = threading.enumerate(), list(logging.getLogger().handlers)
    scaler = torch.amp.GradScaler.step
    tiny_run(sinks=[MemorySink()], probes="deep", strict=True)
    assert (threading.enumerate(), list(logging.getLogger().handlers)) == before
    assert torch.amp.GradScaler.step is scaler
    assert not hooks_left()


def _in_child(queue):
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink]) as monitor, monitor.round(0):
        monitor.log(x=1)
    queue.put(len(sink.metrics("user.x")))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_child_processes(method):
    """A child that forks or spawns while a monitor is open neither hangs nor writes into the parent's run."""
    monitor, sink = watched()
    context = multiprocessing.get_context(method)
    with monitor, monitor.round(0), monitor.client("c0"):
        monitor.log(before=1)
        queue = context.Queue()
        child = context.Process(target=_in_child, args=(queue,))
        child.start()
        assert queue.get(timeout=120) == 1
        child.join(120)
        assert child.exitcode == 0
        monitor.log(after=1)
    assert len(sink.metrics("user.before")) == len(sink.metrics("user.after")) == 1
    assert not sink.metrics("user.x")


def test_forgotten_monitor_is_closed_at_exit():
    """A run that nobody closed is ended when the interpreter leaves, even if its monitor was let go."""
    code = (
        "import gc, fedvitals as fv\n"
        "class Sink:\n"
        "    def write(self, records):\n"
        "        for r in records:\n"
        "            if getattr(r, 'finished', None): print('finished')\n"
        "def main():\n"
        "    monitor = fv.Monitor(None, sinks=[Sink()]); monitor.log(x=1)\n"
        "main(); gc.collect()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["finished"], done.stderr
