# SPDX-License-Identifier: Apache-2.0
"""Histories for tests of detectors: of a small federation that is really trained, or of numbers by hand."""

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Metric, Where
from fedvitals.store.in_memory import MemoryStore

SMALL = {"dataset": "digits", "clients": 6, "rounds": 3, "seed": 11, "local": lab.Local(iterations=5)}


def lab_history(probes="standard", **changes):
    """What a monitor saw of a small federation."""
    store = MemoryStore()
    experiment = lab.Experiment(**{**SMALL, **changes})
    with Monitor(None, sinks=[store], probes=probes) as monitor:
        engine = "stacked" if getattr(experiment.model, "stackable", False) else "sequential"
        lab.run(experiment, monitor, engine=engine)
    return store.history(monitor.run.id)


def history_of(values, events=()):
    """From {(metric, node): [value of round 0, of round 1, ...]}; None leaves a round out. `events` of «by hand»."""
    store = MemoryStore()
    store.write(events)
    store.write(
        [
            Metric(Where("by hand", number, node), float(number), name, value, f"{name} {node}", number)
            for (name, node), series in values.items()
            for number, value in enumerate(series)
            if value is not None
        ]
    )
    return store.history("by hand")


def findings_of(detectors, history, number):
    return [found for detector in detectors for found in detector(history, number)]
