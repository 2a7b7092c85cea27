# SPDX-License-Identifier: Apache-2.0
"""The monitor of one lab experiment, as created by the command line, in whichever process the experiment runs."""

from __future__ import annotations

from collections.abc import Sequence

from fedvitals.lab import Experiment
from fedvitals.monitor.monitor import Monitor
from fedvitals.protocols import RecordWriter, TapeRecorder


def monitor_of(
    experiment: Experiment,
    store: str,
    *,
    run: str | None,
    probes: str,
    sinks: Sequence[RecordWriter] = (),
    tape: TapeRecorder | None = None,
) -> Monitor:
    """`run`: the id of one that the store may have already."""
    return Monitor(
        store,
        run=experiment.name,
        id=run,
        probes=probes,
        host="lab",
        seed=experiment.seed,
        topology=type(experiment.topology).__name__.lower(),
        config={"experiment": experiment.public_toml()},
        sinks=sinks,
        tape=tape,
    )
