# SPDX-License-Identifier: Apache-2.0
"""Every metric: unit, meaning, formula, origin, and the privacy level from which it may leave a client.

`docs/metrics.md` is generated from this table. Other names are not emitted, except those a user logs: `user.*`.
"""

from __future__ import annotations

from typing import Any

from fedvitals.records import Event, LayerStats, Metric, Record, Sketch, Snapshot
from fedvitals.stats import FAMILIES
from fedvitals.training_measures import (
    ADAPTER_MEASURES,
    DATA_MEASURES,
    LABELLED,
    LANGUAGE_MEASURES,
    LOSS_UNIT,
    TRAINING_MEASURES,
    Measure,
)

ALIVE = "monitor.alive"
_MODEL = "a model"
_UPDATE = "a model in `monitor.client`, or `monitor.updates`"
_INPUTS = "a classifier: one row of outputs per sample"
_JOURNEY = "`monitor.exchange`, or the lab with a network"
_FLOWER = "Flower, with `fv.flower.client_mod`"
_PARTS = "`monitor.part`, or the lab"
_SHARES: dict[str, Any] = {"level": 0, "needs": "a model; the shares: recorded when they change", "rare": True}
_BOTTLENECK: dict[str, Any] = {"level": 0, "needs": "profiling; recorded when the next round has begun"}
_MACHINE: dict[str, Any] = {"level": 0, "needs": "psutil; for GPUs nvidia-ml-py; each second", "rare": True}

_NOT_JUDGED: dict[str, Any] = {"level": 0, "rare": True}
_REASONS = (
    "masked",
    "unseen",
    "transformed",
    "unmeasured",
    "few_clients",
    "few_samples",
)  # see `diagnosis.abstentions`
MEASURES: tuple[Measure, ...] = (
    Measure(
        "loss",
        LOSS_UNIT,
        "Training loss: what the user logged, else `fit.loss_after`; in the task's own unit (cross-entropy: nats).",
        needs="`monitor.log(loss=...)`, or " + LABELLED,
    ),
    Measure(
        "accuracy",
        "share",
        "What the user logged: of a client inside its scope, else of the global model.",
        needs="`monitor.log(accuracy=...)`",
    ),
    Measure(
        "initial.accuracy", "share", "Of the model before the first round.", needs="a host that evaluates it", rare=True
    ),
    Measure(
        "initial.loss", LOSS_UNIT, "Of the model before the first round.", needs="a host that evaluates it", rare=True
    ),
    Measure(
        "local.accuracy",
        "share",
        "Of the new global model on the client's local test; of a round: over all clients' tests («aggregated»).",
        needs="the lab, clients that evaluate on Flower, or `monitor.log`",
    ),
    Measure(
        "local.loss",
        LOSS_UNIT,
        "The same for the loss.",
        "mean over the samples",
        needs="the lab, clients that evaluate on Flower, or `monitor.log`",
    ),
    Measure("absolute_error", "units of the target", "Mean absolute error of the global model.", needs="the lab"),
    Measure("local.absolute_error", "units of the target", "The same on the clients' local tests.", needs="the lab"),
    Measure("attack.success", "share", "Test samples with a backdoor's trigger taken for its target.", needs="the lab"),
    Measure("samples", "samples", "Size of the client's own data set.", needs="`data`"),
    Measure("steps", "steps", "Optimiser steps of the client in this round.", level=0),
    Measure(
        "steps.skipped",
        "steps",
        "Steps that a GradScaler left out because a gradient was not finite.",
        level=0,
        rare=True,
    ),
    *TRAINING_MEASURES,
    *ADAPTER_MEASURES,
    *LANGUAGE_MEASURES,
    Measure(
        "gradient.norm",
        "1",
        "Mean over the steps of the gradient's L2 norm, all layers, as the optimiser uses it.",
        "mean_s ‖g_s‖₂",
        needs=_MODEL,
    ),
    Measure(
        "gradient.norm_max",
        "1",
        "Largest step norm of the client-round; `step` says where.",
        "max_s ‖g_s‖₂",
        needs=_MODEL,
    ),
    Measure("gradient.norm_last", "1", "Norm at the last step.", needs=_MODEL),
    Measure(
        "gradient.norm_unclipped",
        "1",
        "Largest step norm before the user's clipping; absent without clipping.",
        needs="gradients that are changed between backward and step",
        rare=True,
    ),
    Measure(
        "gradient.change",
        "1",
        "Largest relative change of the norm from one step to the next.",
        "max_s |‖g_s‖ − ‖g_{s−1}‖| / ‖g_{s−1}‖",
        needs=_MODEL,
    ),
    Measure(
        "gradient.change_round",
        "1",
        "Relative change of the mean norm against this client's previous round.",
        needs="a second round of the same client",
    ),
    Measure("gradient.nonfinite", "values", "NaN and Inf in the gradients of all steps.", needs=_MODEL),
    Measure("weight.norm", "1", "L2 norm of all weights after training.", "‖w‖₂", needs=_MODEL),
    Measure(
        "weight.drift", "1", "Distance that the weights moved since the round's start.", "‖w − w_start‖₂", needs=_MODEL
    ),
    Measure(
        "weight.drift_init",
        "1",
        "Distance of the weights from the run's first global model.",
        "‖w − w_init‖₂",
        needs="a global model in `monitor.round`",
    ),
    Measure(
        "weight.difference",
        "1",
        "Sum of the weight changes, signed (the paper's Figures 8 and 10).",
        "Σ (w_after − w_before)",
        needs=_MODEL,
    ),
    Measure(
        "weight.difference_absolute", "1", "The weights' change, in magnitudes.", "Σ |w_after − w_before|", needs=_MODEL
    ),
    Measure(
        "weight.update_ratio",
        "1",
        "Size of the change against the size of the weights.",
        "‖w − w_start‖₂ / ‖w_start‖₂",
        needs=_MODEL,
    ),
    Measure("weight.nonfinite", "values", "NaN and Inf in the weights after training.", needs=_MODEL),
    Measure("update.norm", "1", "L2 norm of the client's update.", "‖d‖₂", needs=_UPDATE),
    Measure(
        "update.cosine_mean",
        "1",
        "Cosine of the update to the mean of all *other* clients' updates.",
        "cos(d_i, Σ_{j≠i} d_j)",
        needs="at least two clients in the round",
    ),
    Measure(
        "update.cosine_previous", "1", "Cosine to this client's previous update.", needs="a second round of the client"
    ),
    Measure("update.zero", "0/1", "1 if the update is exactly zero; absent otherwise.", needs=_UPDATE, rare=True),
    Measure(
        "update.nonfinite",
        "values",
        "NaN and Inf in the update, counted by whoever holds it; absent if none.",
        needs=_UPDATE,
        rare=True,
    ),
    Measure(
        "update.duplicates",
        "clients",
        "Other clients that sent exactly the same update in this round; absent if none.",
        needs=_UPDATE,
        rare=True,
    ),
    Measure(
        "update.inputs_alike",
        "1",
        "Largest cosine of the client's input profile to another client's: which inputs of the first dense layer its "
        "updates move more or less than the median client's, averaged over its rounds. Clients that train in the same "
        "trigger are near 1.",
        "max_{j≠i} cos(Σ 0.8ᵃ p_i/‖p_i‖, Σ 0.8ᵃ p_j/‖p_j‖), p = log(q + 1/n) − median, q_k = Σ_r d_rk² / Σ d²",
        needs="four clients in the round, and a dense layer of 32 inputs or more",
    ),
    Measure(
        "update.inputs_apart",
        "1",
        "How far the updates single out few inputs of the first dense layer: the mean of the largest 1 % of the "
        "client's input profile. At 1.4, these inputs move four times as much as in the median client's updates.",
        "mean of the largest 1 % of Σ 0.8ᵃ p_i / Σ 0.8ᵃ",
        needs="four clients in the round, and a dense layer of 32 inputs or more",
    ),
    Measure(
        "update.differs",
        "share",
        "How far what arrived is from what the client says that it sent: the largest difference between the nine sums "
        "of a layer, as a share of its size, up to 1; absent where they agree and have the same layers.",
        needs="updates that the host hands over, and clients that tell of theirs",
        rare=True,
    ),
    Measure(
        "update.factor",
        "1",
        "What the received update is of the one that the client says it trained, where the sums of every layer agree "
        "on one number: −1 negated, 10 ten times as long; absent where the two are equal, or nothing of the kind.",
        "d = k · d_trained",
        needs="updates that the host hands over, and clients that tell of theirs",
        rare=True,
    ),
    Measure(
        "update.base_age",
        "rounds",
        "How many rounds ago the global model had the weights that the received update was added to, where the sums of "
        "every layer agree on it; absent where that is the present model, or unknown.",
        "d = d_trained + w(n rounds ago) − w(now)",
        needs="updates that the host hands over, and clients that tell of theirs",
        rare=True,
    ),
    Measure(
        "update.samples",
        "samples",
        "How many samples the client says it trained on, as the aggregation weighs it.",
        needs="the lab, or `monitor.log`",
        rare=True,
    ),
    Measure(
        "privacy.epsilon",
        "1",
        "Privacy spent so far, at the experiment's δ: of all that the client has sent; of a round: the run's largest.",
        level=0,
        needs="the lab, with `privacy`",
        rare=True,
    ),
    Measure(
        "scale.gsc",
        "1",
        "Gradient scale coefficient as the paper's figures have it: grows with the square of the gain.",
        "mean over samples of (1/√n)·‖J‖_F·‖logits‖ / ‖input‖",
        needs=_INPUTS,
    ),
    Measure("scale.gsc_median", "1", "Gradient scale, median over the samples.", needs=_INPUTS),
    Measure("scale.gsc_spread", "1", "Gradient scale, standard deviation over samples.", needs=_INPUTS),
    Measure("scale.gsc_error", "1", "Standard error of the mean: spread / √samples.", needs=_INPUTS),
    Measure(
        "scale.sensitivity",
        "1",
        "Relative sensitivity of the output to the input; 1 for a linear isotropic map.",
        "mean over samples of (1/√n)·‖J‖_F·‖input‖ / ‖logits‖",
        needs=_INPUTS,
    ),
    Measure("scale.sensitivity_median", "1", "Sensitivity, median over the samples.", needs=_INPUTS),
    Measure("scale.sensitivity_spread", "1", "Sensitivity, standard deviation over samples.", needs=_INPUTS),
    Measure("scale.sensitivity_error", "1", "Standard error of the mean: spread / √samples.", needs=_INPUTS),
    Measure(
        "scale.zero_samples", "samples", "Samples whose output does not answer to the input at all.", needs=_INPUTS
    ),
    Measure(
        "scale.nonfinite_samples", "samples", "Samples whose value is NaN or Inf; left out of the mean.", needs=_INPUTS
    ),
    Measure(
        "scale.images",
        "samples",
        "Samples behind the `scale.*` values. In `standard` a client is due once in each 4 rounds or oftener, by the "
        "work of the training; `fedvitals show` counts.",
        needs=_INPUTS,
    ),
    Measure("scale.from_batch", "0/1", "1 if they are of the last training batch, for want of `data`.", rare=True),
    Measure(
        "nonlinearity.nlc",
        "1",
        "Nonlinearity coefficient: 1 for a linear map, about 1 to 3 at a good start.",
        "√(E‖J·δ‖² / tr Cov_f), δ ~ Cov_x",
        needs="`deep`, and " + _INPUTS,
    ),
    Measure("clients", "clients", "Clients that took part in the round.", level=0),
    Measure("clients.failed", "clients", "Clients whose scope ended with an exception.", level=0),
    *DATA_MEASURES,
    Measure("label.entropy", "nats", "Entropy of the client's label histogram.", level=3, needs=LABELLED),
    Measure("time.round", "seconds", "Length of the round.", level=0),
    Measure(
        "update.staleness",
        "rounds",
        "How many server models ago the client began, where aggregation is asynchronous.",
        level=0,
        needs="the lab, or `monitor.log`",
        rare=True,
    ),
    Measure(
        "time.round_virtual",
        "seconds",
        "Length of the round on the lab's virtual clock.",
        level=0,
        needs="the lab, with a network",
        rare=True,
    ),
    Measure(
        "time.compute_virtual",
        "seconds",
        "The client's training alone, on the lab's virtual clock.",
        level=0,
        needs="the lab, with a network",
        rare=True,
    ),
    Measure(
        "time.clock_error",
        "seconds",
        "By how much the client's clock is wrong at least: what no delay on the way explains; absent if nothing.",
        "sign(θ)·(|θ| − δ/2), NTP's offset θ and round trip δ",
        level=0,
        needs="the lab, with a network",
        rare=True,
    ),
    Measure(
        "time.client_virtual",
        "seconds",
        "The client's whole way on the lab's virtual clock: queue, download, data, training, upload.",
        level=0,
        needs="the lab, with a network",
        rare=True,
    ),
    Measure("time.client", "seconds", "Length of the client's scope.", level=0),
    Measure("time.client_evaluate", "seconds", "That the client's evaluation took.", level=0, needs=_FLOWER, rare=True),
    Measure("time.download", "seconds", "Until the model had arrived there.", level=0, needs=_JOURNEY, rare=True),
    Measure("time.queue", "seconds", "That the client waited for its turn.", level=0, needs=_JOURNEY, rare=True),
    Measure("time.start", "seconds", "That its process took to start.", level=0, needs=_FLOWER, rare=True),
    Measure(
        "time.cpu", "seconds", "Of a processor, that the client's handler took.", level=0, needs=_FLOWER, rare=True
    ),
    Measure("time.reply", "seconds", "Until its answer was in the server's hands.", level=0, needs=_FLOWER, rare=True),
    Measure(
        "time.worked",
        "share",
        "Of the round: in which a client's handler ran, or the server aggregated or evaluated. The rest was waiting.",
        level=0,
        needs=_FLOWER,
        rare=True,
    ),
    Measure("time.data", "seconds", "That the client loaded data.", level=0, needs=_JOURNEY, rare=True),
    Measure("time.upload", "seconds", "Until the client's update had arrived.", level=0, needs=_JOURNEY, rare=True),
    Measure("time.wait", "seconds", "From there to the end of the round.", level=0, needs=_JOURNEY, rare=True),
    Measure("time.aggregate", "seconds", "Aggregation at the server.", level=0, needs=_PARTS, rare=True),
    Measure("time.evaluate", "seconds", "Evaluation at the server.", level=0, needs=_PARTS, rare=True),
    Measure("throughput.samples", "samples/s", "Samples that the client trained on, per second of training.", level=2),
    Measure("time.step", "seconds", "Mean time from one optimiser step to the next.", level=0),
    Measure("time.critical", "seconds", "Until the client that the round waited for was done.", **_BOTTLENECK),
    Measure("bottleneck.compute", "share", "Of the round, computing on its critical path.", **_BOTTLENECK),
    Measure("bottleneck.data_loading", "share", "Of the round, loading data on its critical path.", **_BOTTLENECK),
    Measure(
        "bottleneck.download", "share", "Of the round, the model's way to clients on its critical path.", **_BOTTLENECK
    ),
    Measure("bottleneck.upload", "share", "Of the round, the updates' way back on its critical path.", **_BOTTLENECK),
    Measure("bottleneck.aggregation", "share", "Of the round, aggregating on its critical path.", **_BOTTLENECK),
    Measure("bottleneck.server", "share", "Of the round, the server's other work on its critical path.", **_BOTTLENECK),
    Measure(
        "bottleneck.straggler", "share", "Saved if the round waited for nine tenths of the clients.", **_BOTTLENECK
    ),
    Measure("memory.resident", "bytes", "Resident memory of the process at the end of the scope.", level=0),
    Measure("memory.peak", "bytes", "Largest resident memory of the process so far.", level=0),
    Measure("memory.growth", "bytes", "By how much the process grew while this client alone trained in it.", **_SHARES),
    Measure(
        "memory.kept", "bytes", "Heap in use at its end less at its begin; only where a leak is suspected.", **_SHARES
    ),
    Measure("memory.model", "bytes", "The model's parameters; as in all these, each storage once.", **_SHARES),
    Measure("memory.buffers", "bytes", "The model's buffers.", **_SHARES),
    Measure("memory.gradients", "bytes", "The parameters' gradients.", **_SHARES),
    Measure("memory.optimizer", "bytes", "The state of the optimisers that stepped.", **_SHARES),
    Measure("memory.activations", "bytes", "What autograd holds as the backward pass begins, and outputs.", **_SHARES),
    Measure("memory.batch", "samples", "Samples in the client's first batch, on which it was measured.", **_SHARES),
    Measure("memory.telemetry", "bytes", "What fedvitals holds: copies of weights, updates to compare.", **_SHARES),
    Measure("memory.tensors", "bytes", "The sum of these: a step's peak, as predicted.", **_SHARES),
    Measure("memory.limit", "bytes", "What there is: of the GPU, the container or the machine.", **_SHARES),
    Measure("memory.cuda_allocated", "bytes", "Peak of tensors on CUDA, reset as a client begins.", **_SHARES),
    Measure("memory.cuda_reserved", "bytes", "Peak that torch took there, in use or not.", **_SHARES),
    Measure("machine.cpu", "percent", "Work of all processors together, of the server's machine.", **_MACHINE),
    Measure("machine.memory", "bytes", "Memory that is not available there.", **_MACHINE),
    Measure("machine.memory_free", "bytes", "Memory that is available there.", **_MACHINE),
    Measure("machine.disk_read", "bytes/s", "Read from disks there.", **_MACHINE),
    Measure("machine.disk_written", "bytes/s", "Written to disks there.", **_MACHINE),
    Measure("machine.sent", "bytes/s", "Sent over the network there, by all programs.", **_MACHINE),
    Measure("machine.received", "bytes/s", "Received over the network there.", **_MACHINE),
    Measure("machine.oom_kills", "processes", "Killed there for want of memory; absent if none.", **_MACHINE),
    Measure("process.cpu", "percent", "Work of this process, of one core.", **_MACHINE),
    Measure("process.resident", "bytes", "Resident memory of this process.", **_MACHINE),
    Measure("gpu.utilisation", "percent", "Share of time in which the GPUs computed, their mean.", **_MACHINE),
    Measure("gpu.memory", "bytes", "Memory in use on all GPUs, by all programs.", **_MACHINE),
    Measure("traffic.sent", "bytes", "Bytes that the node sent in this round.", level=0, needs="`monitor.transfer`"),
    Measure("traffic.received", "bytes", "Bytes that the node received.", level=0, needs="`monitor.transfer`"),
    Measure("monitor.cost", "seconds", "Time that measuring took on the training thread.", level=0),
    Measure("monitor.lost", "records", "Records lost so far before they were stored.", level=0),
    Measure(ALIVE, "signs", "1, every ten seconds while the process of the run lives.", level=0),
    Measure("monitor.thinned", "client-rounds", "Client-rounds so far whose layer statistics were left out.", level=0),
    Measure("diagnosis.client_rounds", "client-rounds", "Clients of this round that detectors looked at.", level=0),
    Measure("diagnosis.not_judged", "share", "Of these, those that could not be judged.", level=0),
    *(
        Measure(
            f"diagnosis.not_judged.{rule}", "client-rounds", "Those for this reason (docs/issues.md).", **_NOT_JUDGED
        )
        for rule in _REASONS
    ),
)

HOSTS = (
    "absolute_error", "accuracy", "attack.success", "held_back.loss", "initial.accuracy", "initial.loss", "loss",
    "local.absolute_error", "local.accuracy", "local.loss", "privacy.epsilon", "time.client", "time.client_evaluate",
    "time.client_virtual", "time.clock_error", "time.compute_virtual", "time.cpu", "time.data", "time.download",
    "time.queue", "time.round_virtual", "time.upload", "time.wait", "time.worked", "update.samples",
    "update.staleness",
)  # fmt: skip
"""Known only to the host, which reports it by `log`."""

CATALOG = {measure.name: measure for measure in MEASURES}

LEVELS = (
    "timings, bytes, counts, liveness, error class",
    "also sums over a cohort of at least k clients (default 10)",
    "also per-client scalars: loss, norms, gradient scale, sample count; how data changed, and by how much",
    "also per-layer statistics, histograms, sketches, label histogram; tracebacks by a switch of their own",
    "tensors on the tape, kept on the site where they were made",
)


LAYER_PAIRS = "user.gsc."  # followed by «upper/lower»: the gradient scale between two layers chosen by a user


def public_name(name: str) -> str:
    """Return the name under which a host's own metric is stored: `user.*`, except for the few with a meaning here."""
    return name if name in HOSTS or name.startswith("user.") else f"user.{name}"


SKETCH_LEVEL = 3


def level_of_metric(name: str) -> int:
    """Return the privacy level from which a metric of one client may leave it."""
    measure = CATALOG.get(name)
    return 2 if measure is None else measure.level  # a metric logged by a user is a scalar of one client


def is_update_metric(name: str) -> bool:
    """Return whether a metric can be computed from a client's update alone."""
    return name.startswith("update.")


def is_update_family(family: str) -> bool:
    """Return whether a family of layer statistics can be computed from a client's update alone."""
    return family.partition(".")[0] == "update"


def level_of(record: Record) -> int:
    """Return the privacy level from which a client's record may leave it; any text in it may need a higher one."""
    match record:
        case Metric(name=name):
            return level_of_metric(name)
        case LayerStats(family=family):
            return FAMILIES[family].level
        case Sketch() | Event(name="labels"):
            return SKETCH_LEVEL
        case Event(name="data"):
            return 2
        case Snapshot():
            return 4
    return 0


def from_update(record: Record) -> bool:
    """Return whether a record can be computed from a client's update alone, by anyone who has that."""
    match record:
        case Metric(name=name):
            return is_update_metric(name)
        case LayerStats(family=family):
            return is_update_family(family)
        case Snapshot(kind=kind):
            return kind == "update"
    return isinstance(record, Sketch)


def unit_of(name: str, otherwise: str = "") -> str:
    """Return the metric's unit; `otherwise` for one that is not in the catalogue, such as a user's own."""
    return CATALOG[name].unit if name in CATALOG else otherwise


def meaning_of(name: str) -> str:
    """Return what the metric means; "" for one that is not in the catalogue."""
    return CATALOG[name].meaning if name in CATALOG else ""
