# SPDX-License-Identifier: Apache-2.0
"""A federation in NVFlare's simulator, whose sites wait instead of training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.aggregators import InTimeAccumulateWeightedAggregator
from nvflare.app_common.shareablegenerators import FullModelShareableGenerator
from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather
from nvflare.app_opt.pt.job_config.base_fed_job import BaseFedJob
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.job_config.script_runner import ScriptRunner

import fedvitals as fv
from fedvitals_studies.hangs.plant import CLIENTS, HUNG_ROUND, Plant
from fedvitals_studies.nvflare.jobs import HERE


class SlowAggregator(InTimeAccumulateWeightedAggregator):  # type: ignore[misc] # NVFlare has no types
    """An aggregation that takes a while. `folder`: where the settings of the hang are."""

    def __init__(self, folder: str, expected_data_kind: str = "WEIGHTS") -> None:
        super().__init__(expected_data_kind=expected_data_kind)
        self.folder = folder
        self._round = 0

    def aggregate(self, fl_ctx: FLContext) -> Shareable:
        """Wait, and aggregate."""
        Plant.read(self.folder).work("aggregate", self._round)
        self._round += 1
        return super().aggregate(fl_ctx)


def make_job(plant: Plant) -> Any:
    """Return the job."""
    sys.path.insert(0, str(HERE))
    from digits_model import DigitsModel  # noqa: PLC0415 - found by this path, as NVFlare does

    job = BaseFedJob(name="hangs", min_clients=CLIENTS)
    persistor = job.to_server(PTModel(DigitsModel(0)))["persistor_id"]
    generator = job.to_server(FullModelShareableGenerator(), id="shareable_generator")
    aggregator = job.to_server(SlowAggregator(plant.folder), id="aggregator")
    controller = ScatterAndGather(
        min_clients=CLIENTS,
        num_rounds=HUNG_ROUND + 2,
        aggregator_id=aggregator,
        persistor_id=persistor,
        shareable_generator_id=generator,
    )
    job.to_server(controller)
    job.to_clients(ScriptRunner(str(Path(__file__).with_name("nvflare_site.py")), f"--folder {plant.folder}"))
    return job


def run(plant: Plant) -> None:
    """Run the job in the simulator, each site in a separate process."""
    from nvflare.recipe import SimEnv  # noqa: PLC0415 - slow

    job = make_job(plant)
    fv.nvflare.attach(job, Path(plant.folder, "runs.db"), privacy=3, tracebacks=True)
    SimEnv(num_clients=CLIENTS, workspace_root=str(Path(plant.folder, "workspace"))).deploy(job)


if __name__ == "__main__":
    run(Plant.read(sys.argv[1]))
