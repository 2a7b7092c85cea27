# SPDX-License-Identifier: Apache-2.0
"""Reports what was not measured in a run and why, and how often the rest was measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fedvitals.catalog import CATALOG, HOSTS
from fedvitals.probes.presets import (
    DEEP,
    FIT_PERCENT,
    LIGHT,
    LIGHT_FIT_PERCENT,
    OWN,
    OWN_FIT_PERCENT,
    SCALE_PERCENT,
    STANDARD,
)
from fedvitals.records import Event
from fedvitals.store.read import queries
from fedvitals.store.read.metrics import count_client_rounds, values_in_rounds
from fedvitals.store.read.reader import Reader

# A metric that each measurement of a probe yields once, and the probe's name: for probes that take turns.
TAKING_TURNS = {"fit.samples": "fit", "scale.images": "gradient scale", "nonlinearity.nlc": "nonlinearity"}
SAMPLED = ("fit.samples", "scale.images")  # those whose value is the number of samples
# Percent of the training's work that a preset allows them; every client-round if none is stated.
BUDGETS = {
    LIGHT: {"fit": LIGHT_FIT_PERCENT},
    STANDARD: {"fit": FIT_PERCENT, "gradient scale": SCALE_PERCENT},
    DEEP: {},
    OWN: {"fit": OWN_FIT_PERCENT},
}
TRAINED = "layers.trained"  # the event in which a run reports what trains of a model that is partly frozen
ABSTAINS = "probe.abstains"  # the event in which a probe reports what it does not measure
LOOKED_AT = 5  # newest rounds in which a probe's number of samples is looked up

MASKED = "updates that are seen one by one, which secure aggregation hides"
HIDDEN = "updates that are seen one by one, which this federation hides (secure aggregation or differential privacy)"
UNSEEN = (
    "`monitor.updates(round, {client: update})`: clients that train in workers tell numbers, and send no update here"
)


@dataclass(frozen=True, slots=True)
class Seldom:
    """A probe that takes turns: in how many client-rounds it measured, on how many samples, and its limit."""

    probe: str
    measured: int
    client_rounds: int
    samples: float | None  # per measurement, as a median; None: not reported
    budget: float | None  # percent of the training's work; None: no known limit

    @property
    def text(self) -> str:
        """«fit in 43 of 400 client-rounds, on 8 samples: a budget of 0.7 % of the training's work»."""
        samples = "" if self.samples is None else f", on {self.samples:.0f} sample{'s' * (self.samples != 1)}"
        limited = self.budget is not None and self.measured < self.client_rounds
        why = f": a budget of {self.budget:g} % of the training's work" if limited else ""
        return f"{self.probe} in {self.measured} of {self.client_rounds} client-rounds{samples}{why}"


def seldom_measured(reader: Reader, run: str, preset: str, rounds: Sequence[int]) -> list[Seldom]:
    """Return what is known of the probes that take turns, if they measured anything.

    `preset`: its name, «standard+own» if the user has added probes. `rounds`: those of the run, ascending.
    """
    counts = count_client_rounds(reader, run, ("steps", *TAKING_TURNS))
    values = values_in_rounds(reader, run, SAMPLED, rounds[-LOOKED_AT:]) if rounds else {}
    budgets = BUDGETS.get(preset.partition("+")[0], {})
    unmeasured = []
    for name, probe in TAKING_TURNS.items():
        if name in counts:
            samples = [v for (own, _), by_node in values.items() if own == name for v in by_node.values()]
            common = median(samples) if samples else None
            unmeasured.append(Seldom(probe, counts[name], counts.get("steps", 0), common, budgets.get(probe)))
    return unmeasured


def absent_metrics(reader: Reader, run: str, seen: Collection[str], *, level: int, hides: bool) -> dict[str, str]:
    """Return the metrics that could have been measured and what they would have needed, grouped by reason.

    `seen`: metrics that the run has. `level`: of privacy. `hides`: whether the host said that it hides single clients.
    """
    transformed = queries.events(reader, run, name="updates.transformed")
    masked = any("secure_aggregation" in event.data for event in transformed)
    unseen = "steps" in seen and "update.norm" not in seen  # clients train within view, but send elsewhere
    of_updates = MASKED if masked else HIDDEN if hides else UNSEEN if unseen else None
    abstained = _abstentions(queries.events(reader, run, name=ABSTAINS))
    groups: dict[str, list[str]] = {}
    for name, measure in CATALOG.items():
        if name in seen or not measure.needs or measure.rare:
            continue
        needs = f"privacy level {measure.level}" if measure.level > level else measure.needs
        if name.startswith("update.") and name not in (*HOSTS, "update.differs"):
            needs = of_updates or measure.needs
        probe = name.partition(".")[0]
        needs = abstained.get(probe, needs)
        groups.setdefault(needs, []).append(name)
    for event in queries.events(reader, run, name=TRAINED)[:1]:
        if event.data.get("adapters") == 0 and not any(name.startswith("adapter.") for name in seen):
            groups[f"low-rank adapters: {event.message.rstrip('.')}"] = ["adapter.*"]
    return {", ".join(names): needs for needs, names in groups.items()}


def what_trains(reader: Reader, run: str) -> str | None:
    """Return a sentence on what trains of a run's model; None if it is not known to be partly frozen."""
    events = queries.events(reader, run, name=TRAINED)
    return events[0].message if events else None


def _abstentions(events: Sequence[Event]) -> Mapping[str, str]:
    """Return for each probe why it abstained, as first reported."""
    reasons: dict[str, str] = {}
    for event in events:
        probe = str(event.data.get("doing") or "").removeprefix("the probe ").strip("'")
        reason = event.message.partition(": ")[2] or event.message
        reasons.setdefault(probe, f"what this run does not offer: {reason.rstrip('.')}")
    return reasons
