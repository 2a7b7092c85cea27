# SPDX-License-Identifier: Apache-2.0
"""A store with runs of every kind for the pages that list and compare them: ill, healthy, running, silent, hostile."""

import time
from dataclasses import replace

from fedvitals.records import Finding, Metric, Where
from support.timed_run import STARTED, begin, stored

HOSTILE = "<img src=x onerror=alert(1)>"
JUDGED = {"fedvitals": {"detectors": 34}}


def course(identity, name="quiet", *, rounds=4, best=0.9, seed=0, rate=0.1, started=STARTED, clients=3, **kwargs):
    """A run of some rounds, judged by detectors; accuracy rises to `best` by equal steps."""
    config = {**JUDGED, "rounds": rounds, "local": {"lr": rate}} | kwargs.pop("config", {})
    told = begin(identity, name, seed=seed, started=started, config=config)
    for key, value in kwargs.items():
        change(told, **{key: value})
    for number in range(rounds):
        accuracy = best * (number + 1) / rounds
        told.round({f"c{i}": (1.0, 2.0, 1.0) for i in range(clients)}, accuracy=accuracy, loss=1 - accuracy)
        for i in range(clients):
            told.add(Metric(Where(identity, number, f"c{i}"), told.at, "scale.gsc", rate * (number + 1)))
    return told


def change(timed, **fields):
    """Other words for the run itself."""
    timed.run = replace(timed.run, **fields)
    timed.records[0] = timed.run
    object.__setattr__(timed.run, "source", "hand")
    object.__setattr__(timed.run, "sequence", 0)


def find(timed, node, issue="LABEL_NOISE", severity="warning", since=1, confidence=0.96):
    """The detector speaks in every round from `since` on."""
    for number in range(since, timed.rounds):
        where = Where(timed.run.id, number, node)
        timed.add(Finding(where, timed.at, issue, severity, confidence, f"{node} has it.", {"since": since}))


def ward(path):
    """Five runs: one ill, one healthy, one that runs now, one that fell silent, one that tries to break out."""
    ill = course("a-ill", "ill one", started=STARTED, best=0.7, rate=0.2)
    find(ill, "c1")
    find(ill, "c2", "STRAGGLER", "note")
    healthy = course("b-healthy", "good one", started=STARTED + 1000, rounds=100)
    now = course("c-now", "goes on", started=time.time() + 600, config={"rounds": 10}, finished=None)
    silent = course("d-silent", "fell quiet", started=STARTED + 2000, finished=None, config={"rounds": 10})
    hostile = course("e-" + HOSTILE, HOSTILE, started=STARTED + 3000, host=HOSTILE, topology=HOSTILE)
    find(hostile, HOSTILE, severity="critical")
    return stored(path, ill, healthy, now, silent, hostile)
