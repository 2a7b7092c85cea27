# SPDX-License-Identifier: Apache-2.0
"""One client's vital signs against those of its cohort."""

from __future__ import annotations

from fedvitals.plot.canvas import Figure, drawn, flags, head, nothing, round_axis, sheet
from fedvitals.plot.cohort_band import draw_cohort
from fedvitals.plot.source import Which, check_client, opened
from fedvitals.plot.style import words
from fedvitals.records import AnyName, node_name
from fedvitals.store import Target
from fedvitals.store.read import queries
from fedvitals.views.cases import cases_of, concerns
from fedvitals.views.matrix import metric_matrices

SIGNS = (
    "fit.loss_before", "fit.accuracy_before", "loss", "update.norm", "update.cosine_mean", "gradient.norm",
    "scale.gsc", "time.client",
)  # fmt: skip


@drawn
def client(run: Which, node: AnyName, *, store: Target = None) -> Figure:
    """Draw a client's signs as lines over the band of all clients, with the findings about it on the axis."""
    name = node_name(node)
    with opened(run, store) as (reader, chosen):
        check_client(reader, chosen, name)
        known = set(queries.metric_names(reader, chosen))
        matrices = metric_matrices(reader, chosen, [sign for sign in SIGNS if sign in known])
        cases = [case for case in cases_of(reader, chosen) if concerns(case, name)]
        rounds = reader.history(chosen).rounds()
    shown = {sign: matrix for sign, matrix in matrices.items() if name in matrix.nodes}
    if not shown:
        return nothing(f"{words(name)} told none of the usual signs.")
    lines = -(-len(shown) // 2)
    figure, grid = sheet(lines, 1.7, 2)
    for axes, (sign, matrix) in zip(grid.flat, shown.items(), strict=False):
        draw_cohort(axes, sign, matrix, [name])
        head(axes, sign)
        flags(axes, cases)
        round_axis(axes, rounds, label=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    return figure
