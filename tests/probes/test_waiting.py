# SPDX-License-Identifier: Apache-2.0
"""How often the training thread waits for a device: never before the round ends.

Without gradient scale, which is measured by passes of its own in some clients' rounds, and waits for their results.
"""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import fedvitals as fv
from fedvitals.probes.gradients import gradients
from fedvitals.probes.presets import Planned, preset
from fedvitals.probes.weights import weights
from fedvitals.schedule import always
from fedvitals.testing import MemorySink
from support.pretended_device import DeviceTensor, Pretending, away, on_device

PRESETS = {
    "light": preset("light"),
    "standard": replace(preset("standard"), probes=(Planned(gradients, always), Planned(weights))),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))


def train(model, place, monitor, waited, clip, steps=6):
    """Two rounds of two clients; `waited` gives how often somebody has waited so far. Returns it, by moment."""
    counts = {"in the loop": 0, "at the end": []}
    for number in range(2):
        with monitor.round(number):
            for client in ("a", "b"):
                optimizer = torch.optim.SGD(model.parameters(), 0.05, foreach=False)
                scope = monitor.client(client, model)
                before = waited()
                scope.__enter__()
                for step in range(steps):
                    stream = torch.Generator().manual_seed(step)
                    x, y = torch.randn(16, 12, generator=stream), torch.randint(0, 3, (16,), generator=stream)
                    optimizer.zero_grad(set_to_none=True)
                    functional.cross_entropy(model(place(x)), place(y)).backward()
                    if clip:
                        for parameter in model.parameters():
                            parameter.grad.clamp_(-0.01, 0.01)
                    optimizer.step()
                counts["in the loop"] += waited() - before
                before = waited()
                scope.__exit__(None, None, None)
                counts["at the end"].append(waited() - before)
    return counts


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("memory", [512 << 20, 0])
@pytest.mark.parametrize("probes", ["light", "standard"])
def test_a_pretended_device_is_not_waited_for_before_the_round_ends(probes, memory, clip):
    sink, twin = MemorySink(), MemorySink()
    with fv.Monitor(None, sinks=[twin], probes=PRESETS[probes], update_memory=memory, strict=True) as monitor:
        train(network(), lambda x: x, monitor, lambda: 0, clip)
    model = on_device(network())
    DeviceTensor.waits.clear()
    with (
        Pretending(),
        fv.Monitor(None, sinks=[sink], probes=PRESETS[probes], update_memory=memory, strict=True) as monitor,
    ):
        counts = train(model, away, monitor, DeviceTensor.waits.total, clip)
    assert counts == {"in the loop": 0, "at the end": [0, 0, 0, 0]}
    names = ("update.norm", "gradient.norm_last") if probes == "light" else ("gradient.norm", "weight.norm")
    for name in (*names, *(["gradient.norm_unclipped"] if clip and probes == "standard" else [])):
        assert sink.value(name, node="b", round=1) == pytest.approx(twin.value(name, node="b", round=1), rel=1e-5)


@pytest.fixture
def synchronisations():
    """How often something has waited for the GPU, as torch notices it."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        yield lambda: sum("called a synchronizing CUDA operation" in str(w.message) for w in caught)
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("probes", ["light", "standard"])
def test_a_gpu_is_not_waited_for_before_the_round_ends(probes, clip, synchronisations):
    model = network().cuda()

    def place(values):
        return values.pin_memory().cuda(non_blocking=True)

    for _ in range(2):  # in the first one, what is compiled at its first call is compiled
        with fv.Monitor(None, probes=PRESETS[probes], strict=True) as monitor:
            counts = train(model, place, monitor, synchronisations, clip)
    assert counts == {"in the loop": 0, "at the end": [0, 0, 0, 0]}
