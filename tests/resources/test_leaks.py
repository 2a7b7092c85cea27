# SPDX-License-Identifier: Apache-2.0
"""Real leaks in real trainings are found and named; trainings without one are silent.

Each in a process of its own: what a test before has freed would take up a leak for a while. Nothing here depends on how
fast the machine is. `test_leak_watch.py` has the same without the real growth of a process.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import copy, json, sys
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import fedvitals as fv

kind, rounds, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
hidden, classes = (4096, 10) if kind == "models" else (8, 512) if kind == "outputs" else (128, 10)
shared = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, classes))
x, y = torch.randn(5, 320, 64), torch.randint(0, 10, (5, 320))
kept = []
probes = "deep" if kind == "deep" else "standard"
with fv.Monitor(store, probes=probes, strict=True) as monitor:
    for number in range(rounds):
        with monitor.round(number, shared):
            for c in range(5):
                local = copy.deepcopy(shared)
                optimizer = (torch.optim.SGD if kind == "models" else torch.optim.Adam)(local.parameters(), 1e-3)
                with monitor.client(f"c{c}", local, optimizer, data=(x[c], y[c]), loss=cross_entropy):
                    for step in range(10):
                        batch = slice(32 * step, 32 * step + 32)
                        optimizer.zero_grad()
                        loss = cross_entropy(local(x[c][batch]), y[c][batch])
                        loss.backward()
                        optimizer.step()
                        if kind == "graph":
                            kept.append(cross_entropy(local(x[c]), y[c]))
                        elif kind == "outputs":
                            kept.append(local(x[c]).detach().numpy())
                        elif kind == "inputs":
                            kept.append(x[c] + 1)
                            local(kept[-1])
                        elif kind == "unseen":
                            kept.append(torch.randn(256, 256))
                        elif kind == "one" and c == 2:
                            kept.append(torch.randn(400, 400))
                        elif kind == "garbage":
                            ring = [torch.randn(100, 100)]
                            ring.append(ring)
                if kind == "models":
                    kept.append(local.state_dict())
            shared.load_state_dict(local.state_dict())
    found = [f for f in monitor.findings() if f.issue == "MEMORY_LEAK"]
print(json.dumps([[f.where.round, f.where.node, f.message] for f in found]))
"""


def run(kind, rounds, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = [sys.executable, "program.py", kind, str(rounds), "runs.db"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc"),
]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("graph", "The graphs of 50 more outputs of shape [320, 10] (float32) are alive after each"),
        ("outputs", "50 more outputs of shape [320, 512] (float32) are alive after each"),
        ("inputs", "50 more inputs of shape [320, 64] (float32) are alive after each"),
        ("models", "5 more parameters of shape [4096, 64] (float32) are alive after each"),
    ],
)
def test_a_leak_is_found_and_its_tensors_are_named(kind, named, tmp_path):
    message = run(kind, 18, tmp_path)[-1][2]
    assert named in message


def test_a_leak_of_tensors_that_no_hook_saw_is_reported_as_such(tmp_path):
    message = run("unseen", 26, tmp_path)[-1][2]
    assert "It is outside of the tensors that fedvitals sees" in message
    assert "more" not in message.split("last for")[0]


def test_the_client_that_leaks_is_named(tmp_path):
    """On a busy machine the heap is asked for at fewer clients: then a finding may name none, but never another."""
    findings = run("one", 30, tmp_path)
    assert findings
    assert {node for _, node, _ in findings} <= {None, "c2"}


@pytest.mark.parametrize(("kind", "rounds"), [("clean", 24), ("deep", 15), ("garbage", 18)])
def test_trainings_without_a_leak_are_silent(kind, rounds, tmp_path):
    assert run(kind, rounds, tmp_path) == []
