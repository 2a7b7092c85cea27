# SPDX-License-Identifier: Apache-2.0
"""A process that has as many threads as it may: training goes on, and a monitor can be closed."""

import threading

import pytest
import torch
from torch import nn

import fedvitals as fv


@pytest.fixture
def no_threads(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("tape", [False, True])
def test_training_and_its_end_need_no_thread(tmp_path, tape):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    monitor = fv.Monitor(tmp_path / "runs.db", tape=fv.Tape() if tape else None)
    for number in range(2):
        with monitor.round(number, model), monitor.client("a", model):
            model(torch.ones(3, 4)).sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
    monitor.close()
    monitor.close()
