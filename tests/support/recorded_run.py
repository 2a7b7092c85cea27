# SPDX-License-Identifier: Apache-2.0
"""A small recorded run, for tests of the debugger: c4 learns wrong labels from round 2 on, c2 fails in round 3."""

from pathlib import Path

import fedvitals as fv
from fedvitals import lab

ROUNDS = 6
FAULTS = (lab.label_noise(nodes=["c4"], rate=0.9, since=2), lab.crash(nodes=["c2"], since=3, until=3))


def record(folder: Path, *, engine: str = "stacked", name: str = "rewound", **settings) -> Path:
    """The store. Of the tape's states, every third is kept, and the updates of the last round."""
    given = {"model": "mlp", "clients": 6, "rounds": ROUNDS, "seed": 5, "faults": FAULTS} | settings
    store = folder / "runs.db"
    with fv.Monitor(store, name, host="lab", tape=fv.Tape(every=3)) as monitor:
        lab.run(lab.Experiment(**given), monitor, engine=engine, workers=1)
    return store
