# SPDX-License-Identifier: Apache-2.0
"""Tokens and perplexities of models of transformers and peft whose loss is more than that of the next token."""

import math

import pytest
import torch
from torch.nn import functional

from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.token_counts import PEAK
from fedvitals.testing import MemorySink

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'fedvitals[huggingface]'")
peft = pytest.importorskip("peft", reason="needs peft: pip install 'fedvitals[huggingface]'")
pytest.importorskip("lightning")

from support.small_trainers import VOCABULARY, language_model

SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def mixture_of_experts():
    experts = {"num_local_experts": 3, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE, **HEADS, **experts))


def encoder_and_decoder():
    shape = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, **shape)
    )


def penalised_adapters():
    config = peft.AdaLoraConfig(task_type="CAUSAL_LM", init_r=4, target_r=2, total_step=10, target_modules=["q_proj"])
    return peft.get_peft_model(language_model(), config)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft 0.21 of transformers 5.23
@pytest.mark.parametrize(
    ("build", "moved", "utilised"),
    [(mixture_of_experts, 1, False), (encoder_and_decoder, 0, False), (penalised_adapters, 1, True)],
)
def test_perplexity_is_that_of_the_predicted_tokens_alone(monkeypatch, tmp_path, build, moved, utilised):
    monkeypatch.setenv(PEAK, "1e9")
    torch.manual_seed(0)
    model, sink = build(), MemorySink()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    ids = torch.randint(1, VOCABULARY, (4, 8))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    monitor = Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True)
    with monitor, monitor.round(0), monitor.client("c0", model):
        output = model(input_ids=ids, labels=labels)
        output.loss.backward()
        optimizer.step()
    logits, targets = output.logits[:, : 8 - moved].flatten(0, 1), labels[:, moved:].flatten()
    own = float(functional.cross_entropy(logits.detach(), targets))
    if build is not encoder_and_decoder:
        assert output.loss.item() > own + 0.1
    assert sink.value("perplexity.before", node="c0") == pytest.approx(math.exp(own), rel=1e-4)
    assert sink.value("tokens", node="c0") == 32
    assert ("model.flops_utilisation" in sink.names()) == utilised


def test_batches_of_a_decoder_beside_an_encoder_count_by_all_of_their_labels(tmp_path):
    torch.manual_seed(0)
    model, sink = encoder_and_decoder(), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sums = torch.zeros(2)
    monitor = Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True)
    with monitor, monitor.round(0), monitor.client("c0", model):
        for place in range(16):
            optimizer.zero_grad()
            labels = torch.randint(1, VOCABULARY, (4, 1 if place % 2 else 9))
            loss = model(input_ids=torch.randint(1, VOCABULARY, (4, 8)), labels=labels).loss
            sums += torch.tensor([loss.item() * labels.numel(), labels.numel()]) if place < 2 else 0
            loss.backward()
            optimizer.step()
    mean = float(sums[0] / sums[1])
    assert sink.value("perplexity.before", node="c0") == pytest.approx(math.exp(mean), rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft 0.21 of transformers 5.23
def test_the_first_token_after_a_prompt_is_a_target_as_well(tmp_path):
    """Where the number of targets is passed, the loss is a sum over it, as in Hugging Face's Trainer."""
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, sink = peft.get_peft_model(language_model(), config), MemorySink()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    ids = torch.randint(1, VOCABULARY, (4, 8))
    monitor = Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True)
    with monitor, monitor.round(0), monitor.client("c0", model):
        output = model(input_ids=ids, labels=ids, num_items_in_batch=7)
        output.loss.backward()
        optimizer.step()
    own = functional.cross_entropy(output.logits.detach()[:, 2:-1].flatten(0, 1), ids.flatten())
    assert sink.value("perplexity.before", node="c0") == pytest.approx(math.exp(own), rel=1e-4)
