# SPDX-License-Identifier: Apache-2.0
"""Real leaks in real trainings are found and named; trainings without one are silent.

Each in a process of its own: what a test before has freed would take up a leak for a while.
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
shared = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
x, y = torch.randn(5, 320, 64), torch.randint(0, 10, (5, 320))
kept = []
probes = "deep" if kind == "deep" else "standard"
with fv.Monitor(store, probes=probes, strict=True) as monitor:
    for number in range(rounds):
        with monitor.round(number, shared):
            for c in range(5):
                local = copy.deepcopy(shared)
                optimizer = torch.optim.Adam(local.parameters())
                with monitor.client(f"c{c}", local, optimizer, data=(x[c], y[c]), loss=cross_entropy):
                    for step in range(10):
                        batch = slice(32 * step, 32 * step + 32)
                        optimizer.zero_grad()
                        loss = cross_entropy(local(x[c][batch]), y[c][batch])
                        loss.backward()
                        optimizer.step()
                        if kind == "graph":
                            kept.append(cross_entropy(local(x[c]), y[c]))
                        elif kind == "freed graph":
                            kept.append((loss, torch.randn(100, 100)))
                        elif kind == "outputs":
                            kept.append(local(x[c].repeat(6, 1)).detach().numpy())
                        elif kind == "unseen":
                            kept.append(torch.randn(256, 256))
                        elif kind == "one" and c == 2:
                            kept.append(torch.randn(400, 400))
                        elif kind == "garbage":
                            ring = [torch.randn(100, 100)]
                            ring.append(ring)
                if kind == "models":
                    kept.append(local.state_dict())
                elif kind == "cycle":
                    local.itself = [local]
            shared.load_state_dict(shared.state_dict() if kind == "cycle" else local.state_dict())
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
        ("graph", "50 more tensors of shape [] (float32) that hold their graph"),
        ("tensors", "50 more tensors of shape [150, 150] (float32)"),
    ],
)
def test_a_leak_is_found_and_its_tensors_are_named(kind, named, tmp_path):
    found = run(kind, 18, tmp_path)
    assert found
    assert named in found[-1][2]
    assert found[0][0] <= 18  # and before long


def test_the_client_that_leaks_is_named(tmp_path):
    """On a busy machine growth is looked into at fewer clients: then a finding may name none, but never another."""
    found = run("one", 30, tmp_path)
    assert {node for _, node, _ in found} <= {None, "c2"}
    assert any("[300, 300]" in message for _, _, message in found)


@pytest.mark.parametrize(("kind", "rounds"), [("clean", 24), ("deep", 15), ("garbage", 18)])
def test_trainings_without_a_leak_are_silent(kind, rounds, tmp_path):
    assert run(kind, rounds, tmp_path) == []
