# SPDX-License-Identifier: Apache-2.0
"""What the pages of the documentation take for granted: names that their snippets use, and runs that they look at."""

IMPORTS = """
import copy, secrets, time
import torch
import torch.nn.functional as F
import fedvitals as fv
from fedvitals import lab
"""

RUN = (
    IMPORTS
    + """
def federation(name, rounds=3, faults=(), **settings):
    local = lab.Local(iterations=8)
    experiment = lab.Experiment(model="mlp", clients=8, rounds=rounds, seed=5, local=local, faults=faults)
    with fv.Monitor("runs.db", run=name, host="lab", **settings) as monitor:
        lab.run(experiment, monitor)
"""
)

FLOWER = (
    IMPORTS
    + """
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp.strategy import FedAdam, FedAvg
import contextlib
from support.flower.federation import RUN, HandGrid, client_app, flower_run, model as initial

cleanup = contextlib.ExitStack()
cleanup.enter_context(flower_run(RUN))
grid = HandGrid(client_app(fv.flower.client_mod()), 3, run_id=RUN)
net = torch.nn.Linear(4, 2)
optimizer, loader = torch.optim.SGD(net.parameters(), 0.1), [(torch.randn(4, 4), torch.zeros(4).long())]

def client_fn(context):
    raise NotImplementedError

initial_arrays = model = initial()
monitor = fv.Monitor("runs.db", run="own loop")
rounds = 2

def average(replies):
    return [*replies][0].content["arrays"]

def test(model):
    return 0.5
"""
)

ALERTS = '[channels.log]\nkind = "file"\npath = "alerts.jsonl"\n\n[[rules]]\nwhen = "accuracy < 0.8"\n'

SETUPS = {
    "README.md": IMPORTS
    + """
import lightning
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from nvflare.job_config.api import FedJob
from transformers import Trainer, TrainingArguments

model, rows = torch.nn.Linear(4, 2), [{"x": [0.0] * 4}]
args = TrainingArguments(output_dir="out", report_to=[], use_cpu=True)
recipe = FedJob(name="digits", min_clients=2)
""",
    "CONTRIBUTING.md": IMPORTS + "Where, Finding = fv.Where, fv.Finding\n",
    "docs/alerts.md": """
from pathlib import Path
Path("alerts.toml").write_text("""
    + repr(ALERTS)
    + """)
""",
    "docs/cure.md": IMPORTS
    + """
model = torch.nn.Linear(4, 3)
data = (torch.randn(30, 4), torch.randint(3, (30,)))
""",
    "docs/exporters.md": RUN + "federation('digits')\n",
    "docs/flower.md": FLOWER,
    "docs/lab.md": IMPORTS,
    "docs/opentelemetry.md": IMPORTS,
    "docs/profile.md": IMPORTS
    + """
monitor = fv.Monitor("runs.db")
average, updates, test = lambda updates: None, {}, lambda model: 0.5
""",
    "docs/replay.md": FLOWER
    + RUN
    + """
faults = [lab.sign_flip(nodes=["c4"], strength=9.0, since=4)]
federation("digits", rounds=10, faults=faults, tape=fv.Tape())
net = lambda: torch.nn.Linear(2, 2)
""",
    "docs/schema.md": RUN + "federation('digits', rounds=1)\n",
    "docs/trainers.md": IMPORTS
    + """
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

model = Model()
rows = [{"x": torch.randn(4), "labels": torch.tensor(i % 2)} for i in range(16)]
args = TrainingArguments(
    output_dir="out", report_to=[], use_cpu=True, max_steps=2, save_strategy="no", disable_tqdm=True
)
""",
}
