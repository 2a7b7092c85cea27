# SPDX-License-Identifier: Apache-2.0
"""The part of the catalogue about a client's local training: how well the model fits, its losses, the settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    unit: str
    meaning: str
    formula: str = ""
    level: int = 2  # per-client scalars need level 2 (see docs/metrics.md, «Privacy»)
    needs: str = ""  # what the user must pass in for it to be measured
    rare: bool = False  # absent means none, not unmeasured


LABELLED = "`data` that yields (x, y), and `loss`"
LOSS_UNIT = "1"  # the task's own: nats for a cross-entropy, squared target units for a squared error
_CROSS_ENTROPY = "a classifier that trains by cross-entropy on one label per sample; `standard` or `deep`"
_LARGE_VOCABULARY = (
    "a language model of more than 1,024 tokens that trains by cross-entropy, and 4 such targets; `standard` or `deep`"
)
_TEXT_LOSS = "a language model that trains by cross-entropy, and 4 such texts; `standard` or `deep`"
_SQUARED_ERROR = "a regression that trains by a squared error, and `data` of two tensors; `standard` or `deep`"
_OPTIMIZER = "a model that an optimiser of torch trains"

TRAINING_MEASURES: tuple[Measure, ...] = (
    Measure(
        "fit.loss_before",
        LOSS_UNIT,
        "Loss of the received model on own samples, before training.",
        "mean over at most 64 samples",
        needs=LABELLED,
    ),
    Measure(
        "fit.loss_after",
        LOSS_UNIT,
        "Loss of the trained model, on the same samples as before.",
        "mean over at most 64 samples",
        needs=LABELLED,
    ),
    Measure("fit.accuracy_before", "share", "Accuracy of the received model on own samples.", needs=LABELLED),
    Measure("fit.accuracy_after", "share", "Accuracy of the trained model on own samples.", needs=LABELLED),
    Measure("fit.loss_p90", LOSS_UNIT, "Ninth decile of the received model's loss on own samples.", needs=LABELLED),
    Measure(
        "fit.confusion",
        "share",
        "How far the received model's errors gather in one pair of classes.",
        "max over a≠b of max(C_ab − 1, 0) / (n_a + 2)",
        needs=LABELLED,
    ),
    Measure(
        "fit.confused_label",
        "class",
        "The label in that pair; absent if nothing is confused.",
        level=3,
        needs=LABELLED,
        rare=True,
    ),
    Measure("fit.confused_guess", "class", "What the model takes it for.", level=3, needs=LABELLED, rare=True),
    Measure(
        "fit.confident_wrong",
        "share",
        "Own samples that the received model gets wrong, and is sure of it.",
        "share with p > 0.7 for another class than the label",
        needs=LABELLED,
    ),
    Measure(
        "fit.samples",
        "samples",
        "Own samples behind the `fit.*` values of this round: 8 to 64, by the work of the training. A client is due "
        "once in each 2 rounds (`light`: 20) or oftener; `fedvitals show` counts.",
        needs=LABELLED,
    ),
    Measure(
        "train.loss_first",
        "nats",
        "Mean cross-entropy of the samples in the client's first pass over its data, each as its step found it (all "
        "steps where `data` is unknown); without the training's class weights.",
        "mean over samples of −log p_y",
        needs=_CROSS_ENTROPY,
    ),
    Measure(
        "train.loss_last",
        "nats",
        "The same of the last eighth of the last pass, and of at least 16 samples; absent if no pass came to its end.",
        "mean over samples of −log p_y",
        needs=_CROSS_ENTROPY + ", and `data`",
        rare=True,
    ),
    Measure(
        "train.accuracy",
        "share",
        "Samples of the first pass whose largest logit is that of their label.",
        needs=_CROSS_ENTROPY,
    ),
    Measure(
        "train.confusion",
        "share",
        "How far the errors of the first pass gather in one pair of classes.",
        "max over a≠b of max(C_ab − 1, 0) / (n_a + 2)",
        needs=_CROSS_ENTROPY + ", of at most 100 classes",
    ),
    Measure(
        "train.confused_label",
        "class",
        "The label in that pair; absent if nothing is confused.",
        level=3,
        needs=_CROSS_ENTROPY,
        rare=True,
    ),
    Measure("train.confused_guess", "class", "What the model takes it for.", level=3, needs=_CROSS_ENTROPY, rare=True),
    Measure(
        "train.loss_common",
        "nats",
        "Mean cross-entropy of the first pass's targets that are common tokens: the vocabulary's first 1,024. Most "
        "tokenisers number tokens by how common they are.",
        "mean of −log p_y over targets y < 1,024",
        needs=_LARGE_VOCABULARY,
        rare=True,
    ),
    Measure(
        "train.loss_rare",
        "nats",
        "Mean cross-entropy of the first pass's other targets, which are rarer tokens.",
        "mean of −log p_y over targets y ≥ 1,024",
        needs=_LARGE_VOCABULARY,
        rare=True,
    ),
    Measure(
        "train.loss_short",
        "nats",
        "Mean cross-entropy of the first pass's targets in texts with fewer than 128 of them. A row of a batch is a "
        "text; ignored targets, such as padding, do not count.",
        "mean of −log p_y over targets of such texts",
        needs=_TEXT_LOSS,
        rare=True,
    ),
    Measure(
        "train.loss_long",
        "nats",
        "Mean cross-entropy of the first pass's targets in longer texts.",
        "mean of −log p_y over targets of texts with 128 or more",
        needs=_TEXT_LOSS,
        rare=True,
    ),
    Measure(
        "train.residual_mean",
        "1",
        "Prediction less target over the first pass, each as its step found it, on average.",
        "mean of r = z − y",
        needs=_SQUARED_ERROR,
        rare=True,
    ),
    Measure(
        "train.residual_std", "1", "Spread of these residuals.", "√ mean of (r − r̄)²", needs=_SQUARED_ERROR, rare=True
    ),
    Measure(
        "train.residual_kurtosis",
        "1",
        "How heavy their tails are: 3 for a normal distribution, more with few large errors.",
        "mean of (r − r̄)⁴ / std⁴",
        needs=_SQUARED_ERROR,
        rare=True,
    ),
    Measure(
        "optimizer.learning_rate",
        "1",
        "Learning rate at the client's first step, of the optimiser's first group of parameters.",
        needs=_OPTIMIZER,
        rare=True,
    ),
    Measure(
        "optimizer.momentum",
        "1",
        "Momentum at the first step; of Adam and its like their first beta.",
        needs=_OPTIMIZER,
        rare=True,
    ),
    Measure("optimizer.weight_decay", "1", "Weight decay at the first step.", needs=_OPTIMIZER, rare=True),
    Measure(
        "batch.size",
        "samples",
        "Samples in the first forward pass of the client's training.",
        needs="a model; `standard` or `deep`",
        rare=True,
    ),
)


def _data_measures() -> tuple[Measure, ...]:
    needs = "`data` that can be read by index; recorded when the data change"
    numbers = f"{needs}; inputs that are numbers"
    spread = "√ mean of (x − mean)² over all finite inputs"
    return (
        Measure("data.mean", "1", "Mean of all inputs.", "mean of all finite inputs", needs=numbers),
        Measure("data.std", "1", "Spread of all inputs.", spread, needs=numbers),
        Measure("data.min", "1", "Smallest input.", level=3, needs=numbers),
        Measure("data.max", "1", "Largest input.", level=3, needs=numbers),
        Measure("data.missing", "share", "Inputs that are NaN or infinite.", needs=numbers),
        Measure("data.constant", "share", "Features with the same value in every sample.", needs=numbers),
        Measure(
            "data.out_of_range",
            "share",
            "Inputs far outside the usual range of their feature.",
            "share with x > q₃ + 10 (q₃ − q₁) or x < q₁ − 10 (q₃ − q₁), q the quartiles of the feature",
            needs=f"{numbers}: a table of at most 64 features and at least 32 samples",
            rare=True,
        ),
        Measure(
            "data.within_classes",
            "share",
            "Variance of the inputs that lies within classes: 1 if labels say nothing about the inputs.",
            "(tr W / (n − K)) / (tr T / (n − 1)), after a random projection; of images: of their patches",
            needs=f"{needs}; at least two classes of 4 samples",
            rare=True,
        ),
        Measure(
            "data.explained",
            "share",
            "Variance of numeric targets that a linear regression on the inputs explains: 0 if they are unrelated.",
            "1 − (RSS / (n − d − 1)) / (TSS / (n − 1)), d the dimensions of a random projection of the inputs",
            needs=f"{needs}; targets that are numbers or several labels each; at least 40 samples, and 4 (d + 1)",
            rare=True,
        ),
        Measure("data.duplicates", "share", "Samples that equal an earlier one.", needs=needs),
        Measure("data.length", "tokens", "Tokens of a sample other than 0, on average.", needs=f"{needs}; tokens"),
    )


DATA_MEASURES = _data_measures()
"""Metrics of a client's own samples, recorded when they are new or have changed (`probes.data_sketch`)."""

_PAIRS = "low-rank adapters in the global model of `monitor.round`, and the clients' updates"
_RANKS = f"{_PAIRS}; ranks that differ, between clients or from the server's"
_MEAN = f"{_PAIRS}; an aggregation that is a weighted mean"
_MEAN_OF_RANKS = f"{_MEAN}; ranks that differ, between clients or from the server's"

ADAPTER_MEASURES: tuple[Measure, ...] = (
    Measure(
        "adapter.product_error",
        "share",
        "How far the aggregated adapters are from the mean of the clients' products, averaged over the adapters.",
        "mean of ‖s B A − M‖ / ‖M‖, M = Σ w_i s_i B_i A_i, s = α/r",
        needs=_MEAN,
        rare=True,
    ),
    Measure(
        "adapter.product_error_by_rank",
        "share",
        "The same, each direction averaged over the clients that have it; one that none has is as before the round.",
        "M = Σ_k Σ_i (w_i / W_k) s_i b_ik a_ik, W_k = Σ w_i of those with rank ≥ k",
        needs=_MEAN_OF_RANKS,
        rare=True,
    ),
    Measure(
        "adapter.energy_above",
        "share",
        "Of the aggregated product's energy, what is in directions above the smallest rank of a client.",
        "‖s B_{>m} A_{>m}‖² / ‖s B A‖²",
        needs=_RANKS,
        rare=True,
    ),
    Measure(
        "adapter.energy_kept",
        "1",
        "Energy in these directions, over that of their mean over the clients that have them (where none has, as "
        "before the round).",
        "‖s B_{>m} A_{>m}‖² / ‖M_{>m}‖²",
        needs=_MEAN_OF_RANKS,
        rare=True,
    ),
    Measure(
        "adapter.effective_rank",
        "directions",
        "Directions that the aggregated product really uses, averaged over the adapters.",
        "exp(−Σ p log p), p_k = σ_k² / Σ σ²",
        needs=_PAIRS,
        rare=True,
    ),
    Measure("adapter.stable_rank", "directions", "The same by the largest.", "‖P‖² / σ₁²", needs=_PAIRS, rare=True),
    Measure(
        "adapter.change",
        "1",
        "How far the merged weights moved in the round, all adapters together.",
        "√Σ ‖P − P₀‖², P = s B A",
        needs=_PAIRS,
        rare=True,
    ),
    Measure("adapter.drift", "1", "The same since the run's start.", "√Σ ‖P − P_first‖²", needs=_PAIRS, rare=True),
    Measure("adapter.unmoved", "adapters", "Adapters whose product no client has changed.", needs=_PAIRS, rare=True),
    Measure(
        "adapter.scale",
        "1",
        "α/r, averaged over the adapters: of a client as its model has it, of the server's model.",
        needs="low-rank adapters in a client's model, whose module says α/r",
        rare=True,
    ),
    Measure("adapter.rank", "directions", "Largest rank of the client's adapters, as its model has it.", rare=True),
    Measure(
        "update.adapter_change",
        "1",
        "How far a client moved the merged weights, all adapters together.",
        "√Σ ‖s_i B_i A_i − s B₀ A₀‖²",
        needs=_PAIRS,
        rare=True,
    ),
    Measure(
        "update.adapter_rank",
        "directions",
        "Largest rank of what a client sent: directions behind it are zero, or as they were.",
        needs=_PAIRS,
        rare=True,
    ),
    Measure(
        "update.adapter_scale",
        "1",
        "α/r of a client that adapts only some of the layers, relative to the server's for these layers.",
        needs=_PAIRS,
        rare=True,
    ),
)
"""Metrics of low-rank adapters (LoRA), all but two measured at the server (`probes.adapters.watch`)."""

_TEXTS = "a model with an embedding that reads integers [texts, positions]; `standard` or `deep`"
_PREDICTED = f"{_TEXTS}; outputs over the tokens of its own vocabulary"
_MASKED = f"{_TEXTS}; an `attention_mask`, or `config.pad_token_id`"

LANGUAGE_MEASURES: tuple[Measure, ...] = (
    Measure("tokens", "tokens", "Tokens that the client's training read, without padding.", needs=_TEXTS, rare=True),
    Measure("tokens.length", "tokens", "Tokens of a text, on average; without padding.", needs=_TEXTS, rare=True),
    Measure("tokens.padding", "share", "Positions of the batches that are padding.", needs=_MASKED, rare=True),
    Measure(
        "tokens.full",
        "share",
        "Texts that fill the widest batch to its end: cut off there, or as long by chance.",
        needs=_MASKED,
        rare=True,
    ),
    Measure("throughput.tokens", "tokens/s", "Tokens per second of training.", needs=_TEXTS, rare=True),
    Measure(
        "model.flops_utilisation",
        "share",
        "Of the device's peak, what the model's products need: model FLOP utilisation.",
        "tokens/s · (4 N + 2 N_trained) / peak, N weights without embeddings",
        needs=f"{_TEXTS}; a GPU whose peak in half precision is known, or `FEDVITALS_PEAK_FLOPS=9.9e14`; no encoder "
        "beside a decoder, no mixture of experts",
        rare=True,
    ),
    Measure(
        "perplexity.before",
        "1",
        "Perplexity as the training begins: of the loss that the model returns in the first eighth of its passes, at "
        "most 8; of other models that of `train.loss_first`, else of `fit.loss_before`.",
        "exp(loss)",
        needs=_PREDICTED,
        rare=True,
    ),
    Measure(
        "perplexity.after",
        "1",
        "The same as it ends: of the last eighth; of other models that of `train.loss_last`, else of `fit.loss_after`.",
        "exp(loss)",
        needs=_PREDICTED,
        rare=True,
    ),
    Measure(
        "held_back.loss",
        LOSS_UNIT,
        "Loss of the new global model on texts that nobody trains on: what it knew before.",
        needs="`monitor.round(number, model, held_back=samples)` or `Callback(held_back=samples)`",
        rare=True,
    ),
    Measure(
        "initial.held_back.loss",
        LOSS_UNIT,
        "The same of the model before the first round.",
        needs="as of `held_back.loss`",
        rare=True,
    ),
)
"""Metrics of language models, of clients except for the last two (`probes.token_counts`)."""
