# SPDX-License-Identifier: Apache-2.0
"""Pictures of runs, for notebooks and reports: `fv.plot.gsc("baseline", "exploding")` gives a matplotlib Figure.

A run is an id, the beginning of one, or a name (its newest run) in `store=` (default: as everywhere, FEDVITALS_STORE,
else runs.db here); or `(reader, id)` of a store that is open already. `figure.savefig("x.svg")` writes a file.
Needs the extra `plots`.
"""

from fedvitals.plot.client_map import clients
from fedvitals.plot.client_signs import client
from fedvitals.plot.cohort_band import cohort
from fedvitals.plot.comparison import compare
from fedvitals.plot.finding_evidence import finding
from fedvitals.plot.gradient_depth import gradient_flow
from fedvitals.plot.gradient_scale import gsc
from fedvitals.plot.layer_map import layers
from fedvitals.plot.learning_curves import learning
from fedvitals.plot.phase_stack import phases
from fedvitals.plot.round_waterfall import waterfall
from fedvitals.plot.topology_picture import topology
from fedvitals.plot.traffic_bars import traffic
from fedvitals.plot.update_plane import similarity, update_map

__all__ = [
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
    """The pictures only: what draws them is nobody's to call."""
    return __all__
