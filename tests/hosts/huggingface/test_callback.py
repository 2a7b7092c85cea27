# SPDX-License-Identifier: Apache-2.0
"""`fv.huggingface.Callback` in a real `transformers.Trainer`, alone and inside of federations."""

import math

import pytest
import torch

import fedvitals as fv
from fedvitals.errors import ConfigError
from fedvitals.records import Finding, Run
from fedvitals.scope import current
from fedvitals.testing import MemorySink
from support.hooks import hooks_left

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'fedvitals[huggingface]'")
pytest.importorskip("lightning")

from support.small_trainers import VOCABULARY, language_model, texts, tune


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def test_a_training_of_its_own(tmp_path):
    """Epochs are rounds of one client; losses are its own, evaluations the model's; the run ends with the training."""
    sink = MemorySink()
    trainer = tune(
        tmp_path, [fv.huggingface.Callback(None, sinks=[sink], strict=True, run="tune")], eval_strategy="epoch"
    )
    assert [m.value for m in sink.metrics("steps", node="model")] == [6, 6]
    history = trainer.state.log_history
    losses = [row["loss"] for row in history if "loss" in row]
    assert sink.value("loss", round=1, node="model") == pytest.approx(sum(losses[6:]) / 6)
    evaluated = [row["eval_loss"] for row in history if "eval_loss" in row]
    assert [m.value for m in sink.metrics("loss") if m.where.node is None] == pytest.approx(evaluated)
    rates = [row["learning_rate"] for row in history if "learning_rate" in row]
    assert sink.value("user.learning_rate", round=0, node="model") == pytest.approx(rates[5])
    assert sink.value("user.grad_norm", round=0, node="model") > 0
    assert sink.value("gradient.norm", round=0, node="model") > 0
    assert sink.value("throughput.samples", round=0, node="model") > 0
    assert sink.metrics("user.train_runtime", round=1)
    assert sink.of(Run)[-1].finished
    assert sink.of(Run)[-1].name == "tune"
    assert not hooks_left(trainer.model, trainer.optimizer.optimizer)
    assert current.get() is None


def test_held_back_texts_are_measured_after_each_round_and_change_no_bits(tmp_path):
    sink, loader = MemorySink(), torch.utils.data.DataLoader(texts(2), 8)
    trainer = tune(tmp_path, [fv.huggingface.Callback(None, sinks=[sink], strict=True, held_back=loader)])
    losses = [m.value for m in sink.metrics("held_back.loss")]
    assert len(losses) == 2
    assert sink.value("initial.held_back.loss", round=0) != losses[0]
    with torch.no_grad():
        batches = [trainer.model.eval()(**batch).loss for batch in loader]
    assert losses[-1] == pytest.approx(float(sum(batches)) / len(batches), rel=1e-5)
    plain = tune(tmp_path, [])
    assert all(map(torch.equal, weights(trainer.model), weights(plain.model)))


def test_forgetting_is_found_where_other_texts_push_out_what_was_learnt(tmp_path):
    sink, model, known = MemorySink(), language_model(), texts(2)
    tune(tmp_path, [], model, rows=known, num_train_epochs=20)
    callback = fv.huggingface.Callback(None, sinks=[sink], strict=True, held_back=known)
    tune(tmp_path, [callback], model, num_train_epochs=5, learning_rate=3e-3)
    assert sink.of(Finding, "FORGETTING")


CASES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.01},
    "bfloat16": {"bf16": True, "lr_scheduler_type": "cosine"},
    "evaluations": {"eval_strategy": "steps", "eval_steps": 4},
    "checkpointing": {"activation_checkpointing": True},
}


@pytest.mark.parametrize("case", CASES)
def test_watching_changes_no_bits(tmp_path, case):
    plain = tune(tmp_path, [], **CASES[case])
    sink = MemorySink()
    watched = tune(tmp_path, [fv.huggingface.Callback(None, sinks=[sink], strict=True)], **CASES[case])
    assert all(torch.equal(a, b) for a, b in zip(weights(plain.model), weights(watched.model), strict=True))
    steps = {"accumulation": [2, 2], "evaluations": [4, 4, 4]}
    assert [m.value for m in sink.metrics("steps")] == steps.get(case, [6, 6])
    assert not [e for e in sink.events() if e.name.startswith("monitor")], sink.events()
    assert sink.value("gradient.norm", round=0, node="model") > 0


def test_rounds_of_so_many_steps(tmp_path):
    sink = MemorySink()
    tune(tmp_path, [fv.huggingface.Callback(None, sinks=[sink], strict=True, steps=5)])
    assert [m.value for m in sink.metrics("steps")] == [5, 5, 2]


@pytest.mark.parametrize("opened", ["with its model", "without a model", "by the callback"])
def test_inside_of_a_plain_federation(tmp_path, opened):
    """One line on the client's side; its name and its rounds are the federation's."""
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor:
        for number in range(2):
            server = language_model()
            with monitor.round(number, server):
                for name in ("a", "b"):
                    model = language_model()
                    if opened == "by the callback":
                        tune(tmp_path, [fv.huggingface.Callback(monitor, client=name)], model, max_steps=3)
                        continue
                    with monitor.client(name, model if opened == "with its model" else None):
                        tune(tmp_path, [fv.huggingface.Callback(monitor)], model, max_steps=3)
                    assert not hooks_left(model)
    for name in ("a", "b"):
        assert [m.value for m in sink.metrics("steps", node=name)] == [3, 3]
        assert len(sink.metrics("loss", node=name)) == 2
        assert sink.value("user.learning_rate", round=1, node=name) > 0
        assert sink.value("update.norm", round=1, node=name) > 0
    assert len({run.id for run in sink.of(Run)}) == 1


def test_inside_of_a_worker_process(tmp_path):
    """The scope of a worker, as Flower's and NVFlare's clients have it."""
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor, monitor.round(0):
        worker = monitor.host.for_worker()
        with worker.client("a"):
            tune(tmp_path, [fv.huggingface.Callback()], max_steps=3)
        tune(tmp_path, [fv.huggingface.Callback(worker, client="b")], max_steps=2)
        monitor.host.absorb(worker.payload())
    assert [sink.value("steps", node=name) for name in ("a", "b")] == [3, 2]
    assert sink.value("loss", node="a") > 0
    assert not (tmp_path / "runs.db").exists()


def test_errors_of_ours_do_not_stop_the_training(tmp_path, monkeypatch, caplog):
    from fedvitals.hosts import own_failures
    from fedvitals.hosts.loop.model_run import ModelRun

    own_failures._warn_once.cache_clear()
    monkeypatch.setattr(ModelRun, "begin", lambda _: 1 / 0)
    trainer = tune(tmp_path, [fv.huggingface.Callback(None, sinks=[MemorySink()])], max_steps=2)
    assert trainer.state.global_step == 2
    assert sum("division by zero" in line for line in caplog.messages) == 1


def test_a_training_that_fails_is_ended_by_the_next_one(tmp_path):
    sink = MemorySink()
    callback = fv.huggingface.Callback(None, sinks=[sink], strict=True)
    broken = language_model()
    broken.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tune(tmp_path, [callback], broken)
    tune(tmp_path, [callback], max_steps=2)
    assert [m.value for m in sink.metrics("steps")] == [0, 2]
    assert hooks_left(broken) == ["lm_head"]  # the test's own


def test_evaluations_after_the_training(tmp_path):
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor:
        trainer = tune(tmp_path, [fv.huggingface.Callback(monitor)], max_steps=2)
        loss = trainer.evaluate()["eval_loss"]
    assert [m.value for m in sink.metrics("loss") if m.where.node is None] == [pytest.approx(loss)]


def test_settings_that_cannot_be_meant():
    with pytest.raises(ConfigError, match=r"belong to the fv\.Monitor"):
        fv.huggingface.Callback(fv.Monitor(None), probes="light")
    with pytest.raises(ConfigError, match="at least 1"):
        fv.huggingface.Callback(steps=0)
    with pytest.raises(ConfigError, match=r"takes a fv\.Monitor"):
        fv.huggingface.Callback(3)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL has older names for settings
@pytest.mark.parametrize("accumulated", [1, 2])
def test_supervised_fine_tuning(tmp_path, accumulated):
    """TRL's trainer takes the same callback, with adapters of peft. Its models return a loss and no logits."""
    trl = pytest.importorskip("trl", reason="needs TRL: pip install trl")
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    sink = MemorySink()
    rows = [{"input_ids": row["input_ids"].tolist()[: 6 + 4 * (i % 2)]} for i, row in enumerate(texts())]
    arguments = trl.SFTConfig(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=accumulated,
        report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1, bf16=False,
    )  # fmt: skip
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_characters(),
        pad_token="!",
        eos_token="!",
    )
    trainer = trl.SFTTrainer(
        language_model(),
        arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[fv.huggingface.Callback(None, sinks=[sink], strict=True)],
        peft_config=peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    steps = len(losses) // 2
    for number in range(2):
        own = losses[number * steps :][:steps]
        assert sink.value("steps", round=number, node="model") == steps
        assert sink.value("loss", round=number, node="model") == pytest.approx(sum(own) / steps)
        assert sink.value("tokens", round=number, node="model") == sum(len(row["input_ids"]) for row in rows)
        assert sink.value("adapter.scale", round=number, node="model") == 3
        assert sink.value("adapter.change", round=number, node="server") > 0
        for when, loss in (("before", own[0]), ("after", own[-1])):
            perplexity = sink.value(f"perplexity.{when}", round=number, node="model")
            assert perplexity == pytest.approx(math.exp(loss), rel=0.02)  # of a batch; a step may have two


def _characters():
    import tokenizers

    vocabulary = {chr(33 + i): i for i in range(VOCABULARY)}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="!"))
