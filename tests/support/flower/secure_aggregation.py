# SPDX-License-Identifier: Apache-2.0
"""Two rounds of Flower's SecAgg+."""

from flwr.app import Context, RecordDict
from flwr.common import Parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerApp, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

import fedvitals as fv
from support.flower.federation import RUNS, HandGrid, flower_run
from support.flower.legacy import Ordered, client_app


def run(*mods, monitor=None, on_grid=False, fate=None):
    """The model after two rounds; None if nothing was aggregated."""
    strategy, grid = Ordered(), HandGrid(client_app(*mods), run_id=next(RUNS), fate=fate)
    if monitor is not None:
        fv.flower.attach(grid if on_grid else strategy, monitor)
    server = ServerApp()

    @server.main()
    def main(grid, context):
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=2), strategy=strategy)
        secure = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, timeout=30)
        DefaultWorkflow(fit_workflow=secure)(grid, legacy)

    with flower_run(grid.run_id):
        server(grid, Context(run_id=grid.run_id, node_id=1, node_config={}, state=RecordDict(), run_config={}))
    return parameters_to_ndarrays(Parameters(strategy.models[-1], "numpy.ndarray")) if strategy.models else None
