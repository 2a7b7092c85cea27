# SPDX-License-Identifier: Apache-2.0
"""Federated LoRA with transformers and peft: a rank collapse is seen, named and cured, in two minutes on two cores.

Ten clients tune a small GPT-2 on packages of Python's standard library, byte by byte. Devices differ, and so do the
ranks of their adapters: 4, 8 and 16. First the server pads the smaller adapters with zeros and averages, as is usual.
Then it averages each direction over the clients that have it. Nothing is downloaded: the model is made from a
configuration, and learns Python's manual first.

Run it with  python examples/federated_lora.py  and look with  fedvitals ui --store lora.db
"""

import argparse
import copy
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import GPT2Config, GPT2LMHeadModel

import fedvitals as fv

PACKAGES = ["asyncio", "email", "json", "http", "logging", "unittest", "xml", "multiprocessing", "importlib", "ctypes"]
RANKS = dict(zip(PACKAGES, [4, 4, 4, 4, 4, 8, 8, 8, 16, 16], strict=True))
LENGTH, BATCH, STEPS, SCALE = 48, 8, 5, 2  # of a text; SCALE is α/r, the same for every rank


def text_of(package, size=100_000):
    files = sorted((Path(sysconfig.get_paths()["stdlib"]) / package).rglob("*.py"))
    content = b"".join(file.read_bytes() for file in files)[:size]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def batch_of(text, generator, size=BATCH):
    places = torch.randint(0, len(text) - LENGTH, (size, 1), generator=generator) + torch.arange(LENGTH)
    return {"input_ids": text[places], "attention_mask": torch.ones_like(places), "labels": text[places]}


def pretrained(steps):
    """Return a small GPT-2 that has read Python's manual."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    optimizer, generator = torch.optim.AdamW(model.parameters(), 3e-3), torch.Generator().manual_seed(0)
    manual = text_of("pydoc_data")[:-10_000]
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch_of(manual, generator)).loss.backward()
        optimizer.step()
    return model


def with_adapters(base, rank):
    torch.manual_seed(1)
    config = LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    return get_peft_model(copy.deepcopy(base), config)


def cut(state, rank):
    """Return the first directions of the global adapters, as many as a client has."""
    return {name: w[:rank] if "lora_A" in name else w[:, :rank] for name, w in state.items()}


def averaged(states, full, *, over_all):
    """Average A and B with zeros for what a client lacks: over all clients, or over those that have a direction."""
    total = {name: torch.zeros_like(w) for name, w in full.items()}
    count = {name: torch.zeros_like(w) for name, w in full.items()}
    for state in states:
        for name, w in state.items():
            total[name][: w.shape[0], : w.shape[1]] += w
            count[name][: w.shape[0], : w.shape[1]] += 1
    return {name: total[name] / (len(states) if over_all else count[name]) for name in full}


def federate(base, run, rounds, *, over_all):
    """Tune in a federation; returns the loss on the clients' own tests and the issues that were found."""
    texts = {package: text_of(package) for package in PACKAGES}
    generator = torch.Generator().manual_seed(2)
    tests = [batch_of(text[-8_000:], torch.Generator().manual_seed(3)) for text in texts.values()]
    manual = batch_of(text_of("pydoc_data")[-10_000:], torch.Generator().manual_seed(4), 32)
    global_model = with_adapters(base, max(RANKS.values()))
    models = {package: with_adapters(base, rank) for package, rank in RANKS.items()}
    with fv.Monitor("lora.db", run=run) as monitor:
        for number in range(rounds):
            with monitor.round(number, global_model):
                sent, states = get_peft_model_state_dict(global_model), []
                for package, text in texts.items():
                    model = models[package]
                    set_peft_model_state_dict(model, cut(sent, RANKS[package]))
                    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 5e-3)
                    with monitor.client(package, model):
                        for _ in range(STEPS):
                            optimizer.zero_grad()
                            model(**batch_of(text[:-8_000], generator)).loss.backward()
                            optimizer.step()
                    states.append({name: w.clone() for name, w in get_peft_model_state_dict(model).items()})
                set_peft_model_state_dict(global_model, averaged(states, sent, over_all=over_all))
                global_model.eval()
                with torch.no_grad():
                    loss = sum(float(global_model(**test).loss) for test in tests) / len(tests)
                    forgotten = float(global_model(**manual).loss)
                monitor.log({"loss": loss, "held_back.loss": forgotten})
        monitor.flush()
        findings = monitor.findings()
    print(f"\n{run}: loss {loss:.3f}")  # noqa: T201
    print(findings)  # noqa: T201
    return loss, {finding.issue for finding in findings}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pretraining", type=int, default=300)
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # for a model this small, a second thread costs more than it gives
    base = pretrained(chosen.pretraining)
    federate(base, "padded with zeros", chosen.rounds, over_all=True)
    federate(base, "each direction over those who have it", chosen.rounds, over_all=False)


if __name__ == "__main__":
    main()
