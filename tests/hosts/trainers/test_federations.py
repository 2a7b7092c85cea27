# SPDX-License-Identifier: Apache-2.0
"""Trainers inside of Flower and NVFlare, and loops of Accelerate: one line, and the client is the federation's."""

import pytest
import torch
from torch.nn import functional

import fedvitals as fv
from fedvitals.records import Finding, Run
from fedvitals.testing import MemorySink

pytest.importorskip("transformers")
pytest.importorskip("lightning")
accelerate = pytest.importorskip("accelerate")

from support.small_trainers import Classifier, fit, language_model, samples, tune


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Where a store of its own would be, if there were one."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".db"]


def test_inside_of_a_flower_app(tmp_path):
    pytest.importorskip("flwr")
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg

    from support.flower.federation import RUNS, client_app, federate, watched

    def train(message, context):
        model = language_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        tune(tmp_path, [fv.huggingface.Callback()], model, max_steps=3)
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 24})}
        return Message(RecordDict(content), reply_to=message)

    app = client_app(fv.flower.client_mod(), train=train)
    with watched() as (monitor, sink):
        federate(FedAvg(), app, monitor, arrays=ArrayRecord(language_model().state_dict()), run_id=next(RUNS))
    for node in ("100", "103"):
        assert sink.value("steps", round=2, node=node) == 3
        assert sink.value("gradient.norm", round=2, node=node) > 0
        assert sink.value("user.learning_rate", round=2, node=node) > 0
    assert {run.name for run in sink.of(Run)} == {"run"}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft 0.21 of transformers 5.23
def test_adapters_inside_of_a_flower_app(tmp_path):
    """What peft sends are the adapters alone, by names of its own; the server has arrays and no model."""
    pytest.importorskip("flwr")
    peft = pytest.importorskip("peft")
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg

    from support.flower.federation import RUNS, client_app, federate, watched

    def adapted(alpha=8):
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(language_model(), config)

    def train(message, context):
        model = adapted(32 if context.node_id == 102 else 8)
        peft.set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
        tune(tmp_path, [fv.huggingface.Callback()], model, max_steps=2)
        content = {"arrays": ArrayRecord(peft.get_peft_model_state_dict(model))}
        return Message(RecordDict(content | {"metrics": MetricRecord({"num-examples": 24})}), reply_to=message)

    arrays = ArrayRecord(peft.get_peft_model_state_dict(adapted()))
    with watched(detectors=["standard"]) as (monitor, sink):
        federate(FedAvg(), client_app(fv.flower.client_mod(), train=train), monitor, arrays=arrays, run_id=next(RUNS))
    assert [sink.value("adapter.scale", round=1, node=node) for node in ("101", "102")] == [2, 8]
    assert sink.value("adapter.rank", round=1, node="100") == 4
    assert 0 < sink.value("adapter.product_error", round=2, node="server") < 0.5
    assert sink.value("adapter.unmoved", round=2, node="server") == 0
    assert sink.value("perplexity.before", round=2, node="100") > 1
    assert {f.where.node for f in sink.of(Finding, "ADAPTER_SCALE_MISMATCH")} == {"102"}


def test_inside_of_an_nvflare_task():
    """The scope that a site opens between `receive` and `send`."""
    pytest.importorskip("nvflare")
    from fedvitals.hosts.nvflare.site.settings import SiteSettings
    from fedvitals.hosts.nvflare.site.task import SiteTask
    from support.nvflare_rounds import JOB, model, result, served

    task = SiteTask(SiteSettings(), JOB, "site-1", 0)
    fit([fv.lightning.Callback()])
    envelope = task.finish()
    with served() as (server, sink):
        asked = server.ask("site-1", model())
        server.answer("site-1", asked, result(model()), envelope.header())
    assert [m.value for m in sink.metrics("steps") if m.where.node == "site-1"] == [12]
    assert [m.where.node for m in sink.metrics("loss")] == ["site-1"]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_of_accelerate(precision):
    """`fv.watch` around it: steps are those of the optimiser, not of the batches; no bit is changed."""
    weights, sink = [], MemorySink()
    for watched in (False, True):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
        model = Classifier().net
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, samples(), scheduler)
        with fv.watch(model, optimizer, None, sinks=[sink] if watched else [], strict=True, steps=3):
            for _ in range(2):
                for batch in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(functional.cross_entropy(model(batch["x"]), batch["y"]))
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert [m.value for m in sink.metrics("steps")] == [3, 3]
    assert sink.value("train.loss_first", round=0, node="model") > 0
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
