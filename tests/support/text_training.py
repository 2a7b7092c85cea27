# SPDX-License-Identifier: Apache-2.0
"""A small language model, texts for it, and its training."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, POSITIONS, IGNORED = 5000, 40, -100


class Language(nn.Module):
    """Predicts each next token from the one before."""

    def __init__(self, vocabulary=VOCABULARY, *, flattened=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.flattened = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary), flattened

    def forward(self, tokens):
        logits = self.head(self.embed(tokens))
        return logits.flatten(0, 1) if self.flattened else logits


def make_texts(texts=32, positions=POSITIONS, vocabulary=VOCABULARY, seed=0):
    """Tokens of all bands, and targets; the rest of a text, and a few tokens of each, are no targets."""
    stream = torch.Generator().manual_seed(seed)
    uniform = torch.rand(texts, positions + 1, generator=stream)
    tokens = (vocabulary**uniform - 1).long()
    lengths = torch.randint(1, positions + 1, (texts, 1), generator=stream)
    ignored = (torch.arange(positions) >= lengths) | (torch.rand(texts, positions, generator=stream) < 0.1)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(ignored, IGNORED)


def steps(data, loss=functional.cross_entropy, batch=4, accumulate=1, precision=None):
    """Steps on batches of texts. The twin keeps logits and targets as [texts, positions, ...]."""

    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for number, (x, y) in enumerate(zip(data[0].split(batch), data[1].split(batch), strict=True)):
            with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
                logits = model(x)
                own = loss(logits.reshape(-1, logits.shape[-1]), y.flatten())
            twin.logits.append(logits.detach().double().reshape(*y.shape, -1))
            twin.labels.append(y)
            (own / accumulate).backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return run
