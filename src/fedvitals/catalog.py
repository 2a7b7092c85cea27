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
    "different_classes",
)  # see `diagnosis.abstentions`
MEASURES: tuple[Measure, ...] = (
    Measure(
        "loss",
        LOSS_UNIT,
        "Training loss: the value logged by the user, else `fit.loss_after`; in the task's unit (cross-entropy: nats).",
        needs="`monitor.log(loss=...)`, or " + LABELLED,
    ),
    Measure(
        "accuracy",
        "share",
        "Accuracy that the user logged: a client's inside its scope, else the global model's.",
        needs="`monitor.log(accuracy=...)`",
    ),
    Measure(
        "initial.accuracy", "share", "Accuracy before the first round.", needs="a host that evaluates it", rare=True
    ),
    Measure("initial.loss", LOSS_UNIT, "Loss before the first round.", needs="a host that evaluates it", rare=True),
    Measure(
        "local.accuracy",
        "share",
        "Accuracy of the new global model on the client's local test set; of a round: over all («aggregated»).",
        needs="the lab, clients that evaluate on Flower, or `monitor.log`",
    ),
    Measure(
        "local.loss",
        LOSS_UNIT,
        "Loss of the new global model on the same test sets.",
        "mean over the samples",
        needs="the lab, clients that evaluate on Flower, or `monitor.log`",
    ),
    Measure("absolute_error", "units of the target", "Mean absolute error of the global model.", needs="the lab"),
    Measure("local.absolute_error", "units of the target", "The same on clients' local test sets.", needs="the lab"),
    Measure(
        "attack.success", "share", "Test samples with a backdoor's trigger classified as its target.", needs="the lab"
    ),
    Measure("samples", "samples", "Size of the client's own data set.", needs="`data`"),
    Measure("steps", "steps", "Optimiser steps of the client in this round.", level=0),
    Measure(
        "steps.skipped",
        "steps",
        "Steps that a GradScaler skipped because a gradient was not finite.",
        level=0,
        rare=True,
    ),
    *TRAINING_MEASURES,
    *ADAPTER_MEASURES,
    *LANGUAGE_MEASURES,
    Measure(
        "gradient.norm",
        "1",
        "L2 norm of the gradient over all layers, as the optimiser uses it; mean over the steps.",
        "mean_s ‖g_s‖₂",
        needs=_MODEL,
    ),
    Measure(
        "gradient.norm_max",
        "1",
        "Largest gradient norm of any step in the client-round; `step` says which.",
        "max_s ‖g_s‖₂",
        needs=_MODEL,
    ),
    Measure("gradient.norm_last", "1", "Gradient norm at the last step.", needs=_MODEL),
    Measure(
        "gradient.norm_unclipped",
        "1",
        "Largest gradient norm of a step before the user's clipping; absent without clipping.",
        needs="gradients that are changed between backward and step",
        rare=True,
    ),
    Measure(
        "gradient.change",
        "1",
        "Largest relative change of the gradient norm from one step to the next.",
        "max_s |‖g_s‖ − ‖g_{s−1}‖| / ‖g_{s−1}‖",
        needs=_MODEL,
    ),
    Measure(
        "gradient.change_round",
        "1",
        "Relative change of the mean gradient norm since this client's previous round.",
        needs="a second round of the same client",
    ),
    Measure("gradient.nonfinite", "values", "NaN and Inf values in the gradients of all steps.", needs=_MODEL),
    Measure("weight.norm", "1", "L2 norm of all weights after training.", "‖w‖₂", needs=_MODEL),
    Measure("weight.drift", "1", "Distance from the weights at the round's start.", "‖w − w_start‖₂", needs=_MODEL),
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
        "weight.difference_absolute", "1", "Sum of the absolute weight changes.", "Σ |w_after − w_before|", needs=_MODEL
    ),
    Measure(
        "weight.update_ratio",
        "1",
        "Size of the change relative to the size of the weights.",
        "‖w − w_start‖₂ / ‖w_start‖₂",
        needs=_MODEL,
    ),
    Measure("weight.nonfinite", "values", "NaN and Inf values in the weights after training.", needs=_MODEL),
    Measure("update.norm", "1", "L2 norm of the client's update.", "‖d‖₂", needs=_UPDATE),
    Measure(
        "update.cosine_mean",
        "1",
        "Cosine between the update and the mean of all *other* clients' updates.",
        "cos(d_i, Σ_{j≠i} d_j)",
        needs="at least two clients in the round",
    ),
    Measure(
        "update.cosine_previous",
        "1",
        "Cosine with this client's previous update.",
        needs="a second round of the client",
    ),
    Measure("update.zero", "0/1", "1 if the update is exactly zero; absent otherwise.", needs=_UPDATE, rare=True),
    Measure(
        "update.nonfinite",
        "values",
        "NaN and Inf values in the update, counted by the process that holds it; absent if none.",
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
        "Largest cosine between the client's input profile and another client's. The profile says which inputs of the "
        "first dense layer its updates move more or less than the median client's, averaged over its rounds. Clients "
        "that train the same trigger are near 1.",
        "max_{j≠i} cos(Σ 0.8ᵃ p_i/‖p_i‖, Σ 0.8ᵃ p_j/‖p_j‖), p = log(q + 1/n) − median, q_k = Σ_r d_rk² / Σ d²",
        needs="four clients in the round, and a dense layer of 32 inputs or more",
    ),
    Measure(
        "update.inputs_apart",
        "1",
        "How strongly the updates single out a few inputs of the first dense layer: the mean of the largest 1 % of the "
        "client's input profile. At 1.4, these inputs move four times as much as in the median client's updates.",
        "mean of the largest 1 % of Σ 0.8ᵃ p_i / Σ 0.8ᵃ",
        needs="four clients in the round, and a dense layer of 32 inputs or more",
    ),
    Measure(
        "update.differs",
        "share",
        "How far the received update is from the one that the client says it sent: the largest difference between the "
        "nine sums of a layer, as a share of its size, up to 1; absent if they agree and have the same layers. Of a "
        "client that withholds its layers only the sum of all weights' changes is compared, and only to tell whether "
        "the update is the negated one.",
        needs="updates that the host passes on, and clients that report theirs",
        rare=True,
    ),
    Measure(
        "update.factor",
        "1",
        "Factor between the received update and the one that the client says it trained, if the sums of every layer "
        "agree on one: −1 means negated, 10 ten times as long; absent if the two are equal or no one factor fits.",
        "d = k · d_trained",
        needs="updates that the host passes on, and clients that report theirs",
        rare=True,
    ),
    Measure(
        "update.base_age",
        "rounds",
        "How many rounds ago the global model had the weights that the received update was added to, if the sums of "
        "every layer agree on it; absent if that is the current model, or unknown.",
        "d = d_trained + w(n rounds ago) − w(now)",
        needs="updates that the host passes on, and clients that report theirs",
        rare=True,
    ),
    Measure(
        "update.samples",
        "samples",
        "How many samples the client says it trained on, as used to weight its update.",
        needs="the lab, or `monitor.log`",
        rare=True,
    ),
    Measure(
        "privacy.epsilon",
        "1",
        "Privacy budget spent so far, at the experiment's δ: by all the client sent; of a round: the run's largest.",
        level=0,
        needs="the lab, with `privacy`",
        rare=True,
    ),
    Measure(
        "scale.gsc",
        "1",
        "Gradient scale coefficient as in the paper's figures; it grows with the square of the gain.",
        "mean over samples of (1/√n)·‖J‖_F·‖logits‖ / ‖input‖",
        needs=_INPUTS,
    ),
    Measure("scale.gsc_median", "1", "Gradient scale, median over the samples.", needs=_INPUTS),
    Measure("scale.gsc_spread", "1", "Gradient scale, standard deviation over the samples.", needs=_INPUTS),
    Measure("scale.gsc_error", "1", "Standard error of the mean: spread / √samples.", needs=_INPUTS),
    Measure(
        "scale.sensitivity",
        "1",
        "Relative sensitivity of the output to the input; 1 for a linear isotropic map.",
        "mean over samples of (1/√n)·‖J‖_F·‖input‖ / ‖logits‖",
        needs=_INPUTS,
    ),
    Measure("scale.sensitivity_median", "1", "Sensitivity, median over the samples.", needs=_INPUTS),
    Measure("scale.sensitivity_spread", "1", "Sensitivity, standard deviation over the samples.", needs=_INPUTS),
    Measure("scale.sensitivity_error", "1", "Standard error of the mean: spread / √samples.", needs=_INPUTS),
    Measure(
        "scale.zero_samples", "samples", "Samples whose output does not depend on the input at all.", needs=_INPUTS
    ),
    Measure(
        "scale.nonfinite_samples", "samples", "Samples whose value is NaN or Inf; left out of the mean.", needs=_INPUTS
    ),
    Measure(
        "scale.images",
        "samples",
        "Samples behind the `scale.*` values. In `standard` a client is due once every 4 rounds or more often, "
        "depending on the training's work; `fedvitals show` counts.",
        needs=_INPUTS,
    ),
    Measure("scale.from_batch", "0/1", "1 if they are of the last training batch, for lack of `data`.", rare=True),
    Measure(
        "nonlinearity.nlc",
        "1",
        "Nonlinearity coefficient: 1 for a linear map, about 1 to 3 at a good initialisation.",
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
        "How many server models ago the client started, if aggregation is asynchronous.",
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
        "Least error of the client's clock: the part that no network delay explains; absent if there is none.",
        "sign(θ)·(|θ| − δ/2), NTP's offset θ and round trip δ",
        level=0,
        needs="the lab, with a network",
        rare=True,
    ),
    Measure(
        "time.client_virtual",
        "seconds",
        "The client's total time on the lab's virtual clock: queue, download, data, training, upload.",
        level=0,
        needs="the lab, with a network",
        rare=True,
    ),
    Measure("time.client", "seconds", "Length of the client's scope.", level=0),
    Measure("time.client_evaluate", "seconds", "Time of the client's evaluation.", level=0, needs=_FLOWER, rare=True),
    Measure("time.download", "seconds", "Time until the model had arrived.", level=0, needs=_JOURNEY, rare=True),
    Measure("time.queue", "seconds", "Time spent waiting for its turn.", level=0, needs=_JOURNEY, rare=True),
    Measure("time.start", "seconds", "Time its process took to start.", level=0, needs=_FLOWER, rare=True),
    Measure("time.cpu", "seconds", "Processor time that the client's handler took.", level=0, needs=_FLOWER, rare=True),
    Measure(
        "time.reply", "seconds", "Time until the server had the client's reply.", level=0, needs=_FLOWER, rare=True
    ),
    Measure(
        "time.worked",
        "share",
        "Share of the round in which a client's handler ran, or the server aggregated or evaluated; the rest: waiting.",
        level=0,
        needs=_FLOWER,
        rare=True,
    ),
    Measure("time.data", "seconds", "Time spent loading data.", level=0, needs=_JOURNEY, rare=True),
    Measure("time.upload", "seconds", "Time until the update had arrived.", level=0, needs=_JOURNEY, rare=True),
    Measure("time.wait", "seconds", "Time from then to the end of the round.", level=0, needs=_JOURNEY, rare=True),
    Measure("time.aggregate", "seconds", "Time of the aggregation at the server.", level=0, needs=_PARTS, rare=True),
    Measure("time.evaluate", "seconds", "Time of the evaluation at the server.", level=0, needs=_PARTS, rare=True),
    Measure("throughput.samples", "samples/s", "Samples that the client trained on, per second of training.", level=2),
    Measure("time.step", "seconds", "Mean time from one optimiser step to the next.", level=0),
    Measure("time.critical", "seconds", "Time until the client that the round waited for was done.", **_BOTTLENECK),
    Measure("bottleneck.compute", "share", "Share of the round: computing on its critical path.", **_BOTTLENECK),
    Measure("bottleneck.data_loading", "share", "Share of the round: loading on its critical path.", **_BOTTLENECK),
    Measure(
        "bottleneck.download", "share", "Share of the round: sending the model on its critical path.", **_BOTTLENECK
    ),
    Measure("bottleneck.upload", "share", "Share of the round: sending updates on its critical path.", **_BOTTLENECK),
    Measure("bottleneck.aggregation", "share", "Share of the round: aggregating on its critical path.", **_BOTTLENECK),
    Measure("bottleneck.server", "share", "Share of the round: other server work on its critical path.", **_BOTTLENECK),
    Measure(
        "bottleneck.straggler", "share", "Share saved by waiting for only nine tenths of the clients.", **_BOTTLENECK
    ),
    Measure("memory.resident", "bytes", "Resident memory of the process at the end of the scope.", level=0),
    Measure("memory.peak", "bytes", "Largest resident memory of the process so far.", level=0),
    Measure("memory.growth", "bytes", "Growth of the process while only this client trained in it.", **_SHARES),
    Measure(
        "memory.kept",
        "bytes",
        "Heap in use at its end minus that at its start; only if a leak is suspected.",
        **_SHARES,
    ),
    Measure("memory.model", "bytes", "The model's parameters; as in all these, each storage once.", **_SHARES),
    Measure("memory.buffers", "bytes", "The model's buffers.", **_SHARES),
    Measure("memory.gradients", "bytes", "The parameters' gradients.", **_SHARES),
    Measure("memory.optimizer", "bytes", "The state of the optimisers that stepped.", **_SHARES),
    Measure("memory.activations", "bytes", "What autograd holds when backward begins, and outputs.", **_SHARES),
    Measure("memory.batch", "samples", "Samples in the client's first batch, on which memory was measured.", **_SHARES),
    Measure("memory.telemetry", "bytes", "What fedvitals holds: copies of weights, updates to compare.", **_SHARES),
    Measure("memory.tensors", "bytes", "The sum of these: the predicted peak of a step.", **_SHARES),
    Measure("memory.limit", "bytes", "Total memory of the GPU, the container or the machine.", **_SHARES),
    Measure("memory.cuda_allocated", "bytes", "Peak memory of tensors on CUDA; reset when a client begins.", **_SHARES),
    Measure("memory.cuda_reserved", "bytes", "Peak memory that torch reserved there, in use or not.", **_SHARES),
    Measure("machine.cpu", "percent", "Use of all processors together, on the server's machine.", **_MACHINE),
    Measure("machine.memory", "bytes", "Memory not available on that machine.", **_MACHINE),
    Measure("machine.memory_free", "bytes", "Memory available on that machine.", **_MACHINE),
    Measure("machine.disk_read", "bytes/s", "Read from that machine's disks.", **_MACHINE),
    Measure("machine.disk_written", "bytes/s", "Written to that machine's disks.", **_MACHINE),
    Measure("machine.sent", "bytes/s", "Sent over that machine's network, by all programs.", **_MACHINE),
    Measure("machine.received", "bytes/s", "Received over that machine's network.", **_MACHINE),
    Measure("machine.oom_kills", "processes", "Killed on that machine for lack of memory; absent if none.", **_MACHINE),
    Measure("process.cpu", "percent", "Processor use of this process, as a share of one core.", **_MACHINE),
    Measure("process.resident", "bytes", "Resident memory of this process.", **_MACHINE),
    Measure("gpu.utilisation", "percent", "Share of time in which the GPUs computed; mean over the GPUs.", **_MACHINE),
    Measure("gpu.memory", "bytes", "Memory in use on all GPUs, by all programs.", **_MACHINE),
    Measure("traffic.sent", "bytes", "Bytes that the node sent in this round.", level=0, needs="`monitor.transfer`"),
    Measure("traffic.received", "bytes", "Bytes that the node received.", level=0, needs="`monitor.transfer`"),
    Measure("monitor.cost", "seconds", "Time that measuring took on the training thread.", level=0),
    Measure("monitor.lost", "records", "Records lost so far before they were stored.", level=0),
    Measure(ALIVE, "signs", "1, every ten seconds while the run's process is alive.", level=0),
    Measure("monitor.thinned", "client-rounds", "Client-rounds so far whose layer statistics were omitted.", level=0),
    Measure("diagnosis.client_rounds", "client-rounds", "Clients of this round that detectors examined.", level=0),
    Measure("diagnosis.not_judged", "share", "Share of these that could not be judged.", level=0),
    *(
        Measure(
            f"diagnosis.not_judged.{rule}",
            "client-rounds",
            "Those not judged for this reason (docs/issues.md).",
            **_NOT_JUDGED,
        )
        for rule in _REASONS
    ),
)

HOSTS = (
    "absolute_error", "accuracy", "attack.success", "held_back.loss", "initial.accuracy", "initial.held_back.loss",
    "initial.loss", "local.absolute_error", "local.accuracy", "local.loss", "loss", "privacy.epsilon",
    "time.client", "time.client_evaluate", "time.client_virtual", "time.clock_error", "time.compute_virtual",
    "time.cpu", "time.data", "time.download", "time.queue", "time.round_virtual", "time.upload", "time.wait",
    "time.worked", "update.samples", "update.staleness",
)  # fmt: skip
"""Known only to the host, which reports it by `log`."""

CATALOG = {measure.name: measure for measure in MEASURES}

LEVELS = (
    "timings, bytes, counts, liveness, error class",
    "also sums over a cohort of at least k clients (default 10)",
    "also per-client scalars: loss, norms, gradient scale, sample count; how data changed, and by how much",
    "also per-layer statistics, histograms, sketches, label histogram; tracebacks have a switch of their own",
    "tensors on the tape, kept at the site where they were made",
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
