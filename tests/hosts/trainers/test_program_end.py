# SPDX-License-Identifier: Apache-2.0
"""A program that a training's exception ends: Hugging Face's Trainer has no callback for it."""

import subprocess
import sys

from fedvitals.store import open_reader
from fedvitals.store.read.events import failures
from fedvitals.store.read.queries import list_runs

PROGRAM = """
import torch
from fedvitals.hosts.trainer_watch import TrainerWatch

watch = TrainerWatch("runs.db", None, None, None, None, {})
watch.begin(torch.nn.Linear(2, 2))
watch.step_begins()
raise ZeroDivisionError("in the training")
"""


def test_the_exception_is_reported(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ZeroDivisionError: in the training")
    with open_reader(tmp_path / "runs.db") as reader:
        (run,) = list_runs(reader)
        assert run.finished
        assert [(node, number) for node, _, number in failures(reader, run.id)] == [("model", 0)]
