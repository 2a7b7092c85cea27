# SPDX-License-Identifier: Apache-2.0
"""Pictures of runs, for notebooks and reports: `fv.plot.gsc("baseline", "exploding")` gives a matplotlib Figure.

A run is an id, the beginning of one, or a name (its newest run) in `store=` (default: as everywhere, FEDVITALS_STORE,
else runs.db here); a run of `fv.open(...)`; or `(reader, id)` of a store that is open already.
`figure.savefig("x.svg")` writes a file. Needs the extra `plots`.
"""

from fedvitals.plot.adapter_ranks import adapters
from fedvitals.plot.cohort_band import client, cohort, learning
from fedvitals.plot.comparison import compare
from fedvitals.plot.finding_evidence import finding
from fedvitals.plot.gradients import gradient_flow, gsc
from fedvitals.plot.heat_maps import clients, layers
from fedvitals.plot.round_stacks import phases, traffic
from fedvitals.plot.round_waterfall import waterfall
from fedvitals.plot.topology_picture import topology
from fedvitals.plot.update_plane import similarity, update_map

__all__ = [
    "adapters",
    "client",
    "clients",
    "cohort",
    "compare",
    "finding",
    "gradient_flow",
    "gsc",
    "layers",
    "learning",
    "phases",
    "similarity",
    "topology",
    "traffic",
    "update_map",
    "waterfall",
]


def __dir__() -> list[str]:
    """List only the pictures: the functions that draw them are not public."""
    return __all__
