# SPDX-License-Identifier: Apache-2.0
"""The words that the wire format sends as numbers: those that occur in nearly every payload.

Part of the format: a word keeps its position for ever, or old payloads would be misread. Nothing has to be added when
the catalogue grows: other words are sent as text.
"""

from __future__ import annotations

WORDS: tuple[str, ...] = (
    "", "monitor", "server", "client", "round", "edge", "model", "update", "telemetry", "global", "optimizer", "rng",
    "debug", "info", "warning", "error", "critical", "note", "log", "labels", "budget", "client.failed",
    "suggested", "trial", "applied", "undone", "refused", "parameter", "buffer", "module", "float32", "torch",
    "gradient", "gradient.steps", "gradient.histogram", "gradient.full", "weight", "update.alignment", "activation",
    "activation.health",
    "loss", "accuracy", "samples", "steps", "steps.skipped", "fit.loss_before", "fit.loss_after",
    "fit.accuracy_before", "fit.accuracy_after", "fit.loss_p90", "fit.confusion", "fit.samples", "gradient.norm",
    "gradient.norm_max", "gradient.norm_last", "gradient.norm_unclipped", "gradient.change", "gradient.change_round",
    "gradient.nonfinite", "weight.norm", "weight.drift", "weight.drift_init", "weight.difference",
    "weight.difference_absolute", "weight.update_ratio", "weight.nonfinite", "update.norm", "update.cosine_mean",
    "update.cosine_previous", "update.zero", "update.duplicates", "scale.gsc", "scale.gsc_median", "scale.gsc_spread",
    "scale.gsc_error", "scale.sensitivity", "scale.sensitivity_median", "scale.sensitivity_spread",
    "scale.sensitivity_error", "scale.zero_samples", "scale.nonfinite_samples", "scale.images", "scale.from_batch",
    "nonlinearity.nlc", "clients", "clients.failed", "label.entropy", "time.round", "time.client", "time.step",
    "memory.resident", "memory.peak", "traffic.sent", "traffic.received", "monitor.cost", "monitor.lost",
)  # fmt: skip

WORDS_SINCE_2: tuple[str, ...] = (
    *WORDS,
    "fit.confused_label", "fit.confused_guess", "fit.confident_wrong", "throughput.samples", "memory.growth",
    "memory.model", "memory.buffers", "memory.gradients", "memory.optimizer", "memory.activations", "memory.telemetry",
    "memory.tensors", "memory.batch", "memory.limit", "update.peers", "time.critical",
)  # fmt: skip
"""The words of version 2; version 1 uses `WORDS`."""

NUMBER_OF: dict[str, int] = {word: number for number, word in enumerate(WORDS_SINCE_2)}
