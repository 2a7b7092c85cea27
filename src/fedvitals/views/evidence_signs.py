# SPDX-License-Identifier: Apache-2.0
"""Maps the numbers of a finding to measured signs, and each issue to the signs that show it best.

A finding's number may be a metric of the catalogue, a sign by which clients are compared
(`diagnosis.evidence.vital_signs`), a statistic of a layer, or something counted on the spot. If no data of that was
kept, the most telling vital sign of the issue is shown instead, with a note.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fedvitals.catalog import CATALOG
from fedvitals.diagnosis.cases import Case
from fedvitals.stats import FAMILIES, PEERS, statistics_of
from fedvitals.views.cases import numbers_of
from fedvitals.views.metric_titles import in_words, metric_title


@dataclass(frozen=True, slots=True)
class Sign:
    """The source of a line: a metric; a statistic of a family in one layer; or events, counted in each round."""

    name: str  # a metric, a family, or the names of events
    statistic: str = ""
    layer: str = ""  # a layer's name, or which of the existing ones: «first», «head», «only», «case»
    events: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """A key that identifies the sign."""
        return "/".join(part for part in (self.name, self.statistic, self.layer, *self.events) if part)


def peers(column: str) -> Sign:
    return Sign("update.peers", column, "only")


def counted(*names: str) -> Sign:
    return Sign("events", events=names)


# The signs by which clients are compared, as measured, and the scale on which they were compared.
COMPARED: dict[str, tuple[Sign, str]] = {
    "norm": (Sign("update.norm"), "log"),
    "share_first": (Sign("update.alignment", "share", "first"), "log"),
    "share_head": (Sign("update.alignment", "share", "head"), "log"),
    "cosine": (peers("cosine"), "artanh"),
    "cosine_first": (peers("first"), "artanh"),
    "cosine_head": (peers("head"), "artanh"),
    "previous": (Sign("update.cosine_previous"), "artanh"),
    "step": (peers("step"), "artanh"),
    "back": (peers("back"), "artanh"),
    "nearest": (peers("nearest"), "−log(1 − x)"),
    "signs": (peers("signs"), ""),
    "classes": (peers("classes"), "artanh"),
    "classes_min": (peers("classes_min"), "artanh"),
    "class_entropy": (peers("class_entropy"), ""),
    "bias": (peers("bias"), "artanh"),
    "spread": (peers("spread"), "log"),
    "loss_before": (Sign("fit.loss_before"), "log"),
    "loss_after": (Sign("fit.loss_after"), "log"),
    "loss_p90": (Sign("fit.loss_p90"), "log"),
    "accuracy_before": (Sign("fit.accuracy_before"), ""),
    "accuracy_after": (Sign("fit.accuracy_after"), ""),
    "confident_wrong": (Sign("fit.confident_wrong"), "√"),
    "confusion": (Sign("fit.confusion"), "√"),
    "gain": (Sign("fit.loss_after"), "log of loss before over after"),
    "gradient": (Sign("gradient.norm"), "log"),
    "gradient_last": (Sign("gradient.norm_last"), "log"),
    "gradient_ratio": (Sign("gradient.norm_last"), "log of the last step over the mean"),
    "gradient_first": (Sign("gradient", "rms", "first"), "log of the first layer over the last"),
    "rate": (Sign("update.norm"), "log per gradient and step"),
    "samples_per_step": (Sign("steps"), "log of samples over steps"),
}

# The statistic to show if a finding names only its family.
OF_FAMILY = {"update": "l2", "gradient": "rms", "weight": "absmax", "buffer": "max", "gradient.steps": "norm_max"}

# Numbers that were computed on the spot: the sign that comes closest.
NEAREST = {
    "gradient.norm_last / gradient.norm_max": Sign("gradient.norm_last"),
    "the server's step against the clients' mean": Sign("weight.update_ratio"),
    "classes missing": Sign("label.entropy"),
    "sent against trained": Sign("update.norm"),
    "share of units without gradient": Sign("update", "sparsity", "case"),
    "steps per sample": Sign("steps"),
}

# Numbers of a finding that are shares; others that were computed on the spot are counts or ratios.
SHARES = frozenset({"labels changed, at least", "share of wrong labels", "share of units without gradient",
                    "share of the next layer's weights that stand still"})  # fmt: skip

EVENTS = ("client.dropped_out", "update.lost", "update.late")  # findings report how often these happened

TELLING: dict[str, tuple[Sign, ...]] = {
    "DIVERGENCE": (Sign("loss"), Sign("fit.loss_before")),
    "OSCILLATION": (Sign("loss"), Sign("update.cosine_previous")),
    "SLOW_PROGRESS": (Sign("loss"), Sign("weight.update_ratio")),
    "PLATEAU": (Sign("loss"), Sign("accuracy")),
    "OVERFITTING": (Sign("fit.loss_before"), Sign("local.loss"), Sign("fit.loss_after")),
    "CLIENT_DRIFT": (Sign("update.cosine_mean"), Sign("weight.drift")),
    "LABEL_NOISE": (Sign("fit.loss_before"), peers("head"), Sign("update.cosine_mean")),
    "LABEL_FLIP": (Sign("fit.confusion"), Sign("fit.loss_before")),
    "INPUT_NOISE": (Sign("fit.loss_after"), peers("first")),
    "INPUT_SCALE": (Sign("gradient.norm"), Sign("update.norm")),
    "MISSING_VALUES": (Sign("data.missing"), Sign("fit.loss_before")),
    "MISSING_CLASSES": (Sign("label.entropy"), Sign("fit.loss_before")),
    "BYZANTINE": (peers("cosine"), Sign("update.norm")),
    "STALE_UPDATE": (Sign("update.cosine_previous"), Sign("update.staleness")),
    "FREE_RIDER": (Sign("update.norm"), peers("step")),
    "DUPLICATE_UPDATE": (peers("nearest"),),
    "WRONG_SAMPLE_COUNT": (Sign("update.samples"), Sign("samples"), counted("update.refused")),
    "WRONG_LEARNING_RATE": (Sign("update.norm"), Sign("weight.update_ratio")),
    "FROZEN_LAYER": (Sign("update", "l2", "case"), Sign("gradient", "rms", "case")),
    "UNUSUAL_CLIENT": (peers("cosine"), Sign("fit.loss_before")),
    "NAN_WEIGHTS": (Sign("weight.nonfinite"), Sign("loss")),
    "NAN_UPDATE": (Sign("weight.nonfinite"), Sign("update.norm")),
    "WEIGHT_EXPLOSION": (Sign("weight.norm"), Sign("weight", "absmax", "case")),
    "GROUP_LEFT_BEHIND": (Sign("fit.loss_before"),),
    "DOMINANT_CLIENT": (Sign("update.samples"), Sign("samples")),
    "BATCH_NORM_STATISTICS": (Sign("buffer", "max", "case"),),
    "RANK_COLLAPSE": (Sign("adapter.energy_kept"), Sign("adapter.effective_rank"), Sign("update.adapter_rank")),
    "ADAPTER_AGGREGATION_BIAS": (Sign("adapter.product_error"), Sign("adapter.change")),
    "ADAPTER_SCALE_MISMATCH": (Sign("adapter.scale"), Sign("update.adapter_change")),
    "DEAD_ADAPTER": (Sign("adapter.unmoved"), Sign("adapter.change")),
    "FORGETTING": (Sign("held_back.loss"), Sign("loss")),
    "LOSS_SPIKE": (Sign("loss"), Sign("fit.loss_before")),
    "LENGTH_IMBALANCE": (Sign("tokens.length"), Sign("tokens.padding"), Sign("tokens.full")),
    "NOTHING_AGGREGATED": (counted("client.failed", "client.dropped_out", "update.late", "update.lost"), Sign("loss")),
    "TRANSFORMED_UPDATES": (Sign("update.norm"), Sign("weight.drift")),
    "ZERO_TOTAL_WEIGHT": (Sign("update.samples"), counted("aggregation.failed")),
    "SHAPE_OR_DTYPE_MISMATCH": (counted("update.refused"),),
    "NAN_GRADIENT": (Sign("gradient.nonfinite"), Sign("gradient.norm")),
    "GRADIENT_SCALE": (Sign("scale.gsc"), Sign("gradient", "rms", "case")),
    "EXPLODING_GRADIENT": (Sign("gradient", "rms", "case"), Sign("gradient.norm_max")),
    "VANISHING_GRADIENT": (Sign("gradient", "rms", "case"), Sign("gradient.norm")),
    "DEAD_UNITS": (Sign("activation.health", "dead_fraction", "case"), Sign("update", "sparsity", "case")),
    "SATURATED_UNITS": (Sign("activation.health", "saturated_fraction", "case"), Sign("update", "sparsity", "case")),
    "POOR_INITIALISATION": (Sign("gradient", "rms", "case"), Sign("loss")),
    "COMMUNICATION_FAILURE": (counted("update.lost"), Sign("traffic.sent")),
    "TIMEOUT": (counted("update.late"), Sign("time.client_virtual"), Sign("time.client")),
    "STRAGGLER": (
        Sign("time.compute_virtual"),
        Sign("time.client_virtual"),
        Sign("time.client"),
        Sign("time.client_evaluate"),
    ),
    "DROP_OUT": (counted("client.dropped_out", "client.disconnected"), Sign("steps")),
    "CRASH": (counted("client.failed", "edge.failed", "round.failed"),),
    "OUT_OF_MEMORY": (
        counted("client.failed", "edge.failed", "round.failed"),
        Sign("memory.peak"),
        Sign("memory.resident"),
    ),
    "STALLED": (Sign("time.round"),),
    "MEMORY_LEAK": (Sign("memory.resident"), Sign("memory.kept")),
    "DISK_FULL": (counted("client.failed", "monitor.error"), Sign("machine.disk_written")),
    "CLOCK_SKEW": (Sign("time.clock_error"),),
    "TELEMETRY_LOST": (Sign("monitor.lost"), counted("worker.lost", "telemetry.refused")),
    "BOTTLENECK": (Sign("time.round"), Sign("time.client")),
}

LAST_RESORT: dict[str, tuple[Sign, ...]] = {
    "convergence": (Sign("loss"), Sign("accuracy"), Sign("fit.loss_before"), Sign("local.loss")),
    "client": (Sign("fit.loss_before"), Sign("update.norm"), Sign("gradient.norm"), Sign("loss"), Sign("time.client")),
    "aggregation": (Sign("weight.norm"), Sign("update.norm"), Sign("loss"), Sign("accuracy")),
    "gradient": (Sign("gradient.norm"), Sign("gradient.norm_max"), Sign("update.norm"), Sign("loss")),
    "system": (Sign("time.client"), Sign("time.round"), Sign("memory.resident"), Sign("traffic.sent")),
    "user": (Sign("loss"), Sign("accuracy"), Sign("update.norm"), Sign("time.round")),
}


def sign_of(name: str, case: Case) -> Sign | None:
    """Return the sign behind a number with that name; None if unknown."""
    known = COMPARED[name][0] if name in COMPARED else NEAREST.get(name)
    if known is not None:
        return known
    if name.startswith("pressure of "):
        return Sign("gradient", "rms", name.removeprefix("pressure of "))
    if name.startswith("update.peers."):
        return peers(name.removeprefix("update.peers."))
    if name.partition(" ")[0] in FAMILIES:
        return _of_family(*name.partition(" ")[::2], case)
    if name in EVENTS:
        return counted(name)
    return Sign(name) if name in CATALOG or name.startswith("user.") else None


def _of_family(family: str, statistic: str, case: Case) -> Sign | None:
    chosen = statistic or OF_FAMILY.get(family, "")
    return Sign(family, chosen, "case") if chosen in statistics_of(family) and case.layer is not None else None


def named_signs(case: Case) -> list[tuple[Sign, dict[str, object]]]:
    """Return the signs that the finding itself names, with their numbers, the furthest from usual first."""
    rows = [dict(row) for row in numbers_of(case)]
    rows.sort(key=lambda row: -abs(row["score"]) if isinstance(row.get("score"), int | float) else 0.0)
    signs: dict[str, tuple[Sign, dict[str, object]]] = {}
    # For a deep network, only the pressure of the layer in question.
    own = [row for row in rows if row.get("name") == f"pressure of {case.layer}"]
    for row in own or rows:
        sign = sign_of(str(row.get("name")), case)
        if sign is not None:
            signs.setdefault(sign.id, (sign, row))
    return list(signs.values())


def telling_signs(case: Case) -> list[Sign]:
    """Return the signs that show the issue best."""
    bound = case.newest.evidence.get("bound_by")
    first = [Sign(f"bottleneck.{bound}")] if f"bottleneck.{bound}" in CATALOG else []
    return [*first, *TELLING.get(case.issue, ())]


def last_resorts(case: Case) -> list[Sign]:
    """Return the signs of the issue's family, then general ones, if there is nothing closer."""
    return list(dict.fromkeys([*LAST_RESORT.get(case.issue_entry.family, ()), *LAST_RESORT["user"], Sign("steps")]))


def metrics_behind(case: Case, names: Collection[str]) -> list[str]:
    """Return the metrics among `names` behind a case: those that its finding names, then those that show it best."""
    signs = [*(sign for sign, _ in named_signs(case)), *telling_signs(case)]
    plain = [sign.name for sign in signs if not sign.statistic and not sign.events and sign.name in names]
    return list(dict.fromkeys(plain))


def layer_statistic_behind(case: Case, families: Mapping[str, Collection[str]]) -> tuple[str, str] | None:
    """Return the family and statistic behind a case of a layer; None if that is another sign."""
    if case.layer is None:
        return None
    signs = [*(sign for sign, _ in named_signs(case)), *telling_signs(case)]
    return next(((s.name, s.statistic) for s in signs if s.statistic in families.get(s.name, ())), None)


# The title of a sign on a plot, and its unit; others use the catalogue's name.
WORDING = {
    "update.peers/cosine": ("direction of the update, against the others'", "cosine"),
    "update.peers/first": ("direction of the first layer's update, against the others'", "cosine"),
    "update.peers/head": ("direction of the last layer's update, against the others'", "cosine"),
    "update.peers/step": ("direction of the update, along the server's last step", "cosine"),
    "update.peers/back": ("direction of the update, back to an earlier model", "cosine"),
    "update.peers/nearest": ("likeness to the nearest other update", "cosine"),
    "update.peers/signs": ("signs that are the others'", "share"),
    "update.peers/classes": ("direction by class, against the others'", "cosine"),
    "update.peers/classes_min": ("direction of the worst class, against the others'", "cosine"),
    "update.peers/class_entropy": ("how evenly the classes move", "share"),
    "update.peers/bias": ("direction of the last bias, against the others'", "cosine"),
    "update.peers/spread": ("how evenly the weights move", "share"),
    "update.alignment/share": ("share of the update in {layer}", "share"),
    "gradient/rms": ("gradient of {layer}, root mean square", "1"),
    "update/l2": ("size of the update of {layer}", "1"),
    "update/sparsity": ("weights of {layer} that stand still", "share"),
    "weight/absmax": ("largest weight of {layer}", "1"),
    "buffer/max": ("largest value of {layer}", "1"),
    "gradient.steps/norm_max": ("largest step of {layer}", "1"),
    "activation.health/dead_fraction": ("dead outputs of {layer}", "share"),
    "activation.health/saturated_fraction": ("saturated outputs of {layer}", "share"),
}


# The first of the events that are counted together → their title on a plot.
OF_EVENTS = {
    "client.failed": "errors in a round",
    "client.dropped_out": "drop-outs in a round",
    "update.lost": "updates lost in a round",
    "update.late": "updates that came too late",
    "update.refused": "refused updates in a round",
    "aggregation.failed": "failed aggregations in a round",
    "worker.lost": "lost workers and refused telemetry",
}


def title_of(sign: Sign, layer: str | None) -> str:
    """Return the title of a sign."""
    if sign.events:
        return OF_EVENTS.get(sign.events[0]) or " or ".join(name.replace(".", " ") for name in sign.events)
    if not sign.statistic:
        return metric_title(sign.name)
    title = WORDING.get(f"{sign.name}/{sign.statistic}", (f"{sign.name}: {sign.statistic} of {{layer}}", ""))[0]
    return title.replace("{layer}", layer or "the model")


def meaning_of(sign: Sign) -> str:
    """Return what the sign means, in words."""
    if sign.name != "update.peers":
        return in_words(CATALOG[sign.name].meaning) if sign.name in CATALOG else ""
    if sign.statistic in ("first", "head"):
        return f"{PEERS['cosine']}; on the {'first' if sign.statistic == 'first' else 'last'} weight".replace("`", "")
    return PEERS.get(sign.statistic, "").replace("`", "")


def unit_of(sign: Sign) -> str:
    """Return the unit of the sign."""
    if sign.events:
        return "events"
    known = WORDING.get(f"{sign.name}/{sign.statistic}")
    return known[1] if known is not None else CATALOG[sign.name].unit if sign.name in CATALOG else "1"
