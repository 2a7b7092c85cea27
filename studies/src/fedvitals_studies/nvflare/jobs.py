# SPDX-License-Identifier: Apache-2.0
"""The study's jobs: one federation of digits in several of NVFlare's workflows."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORKFLOWS = ("fedavg", "scatter-and-gather", "fedopt", "cyclic")


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What a job trains, and which fault is planted.

    `patience`: seconds for which scatter-and-gather waits for the last site when all others have answered.
    """

    workflow: str = "scatter-and-gather"
    sites: int = 6
    rounds: int = 6
    seed: int = 0
    fault: str = "none"
    faulty: str = "site-3"
    since: int = 2
    external: bool = False
    watched: bool = True  # whether the script has `fv.watch`
    patience: int = 10

    @property
    def script_arguments(self) -> str:
        """The arguments of the site's script."""
        return (
            f"--sites {self.sites} --seed {self.seed} --fault {self.fault} --faulty {self.faulty} "
            f"--since {self.since} --watched {int(self.watched)}"
        )


def make_job(settings: JobSettings, name: str = "digits") -> Any:
    """Return a recipe, or a FedJob, by the name of its workflow."""
    if str(HERE) not in sys.path:  # as NVFlare does with the folder that it copies these files to
        sys.path.insert(0, str(HERE))
    makers = {
        "fedavg": _fedavg,
        "scatter-and-gather": _scatter_and_gather,
        "fedopt": _fedopt,
        "cyclic": _cyclic,
    }
    return makers[settings.workflow](settings, name)


def _model(settings: JobSettings) -> Any:
    from digits_model import DigitsModel  # noqa: PLC0415 - found by the path that `make_job` sets

    return DigitsModel(settings.seed)


def _of_recipe(settings: JobSettings, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": _model(settings),
        "min_clients": settings.sites,
        "num_rounds": settings.rounds,
        "train_script": str(HERE / "site_script.py"),
        "train_args": settings.script_arguments,
        "launch_external_process": settings.external,
    }


def _fedavg(settings: JobSettings, name: str) -> Any:
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe  # noqa: PLC0415 - an extra

    return FedAvgRecipe(**_of_recipe(settings, name))


def _fedopt(settings: JobSettings, name: str) -> Any:
    from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe  # noqa: PLC0415 - an extra

    optimizer = {"path": "torch.optim.SGD", "args": {"lr": 1.0}, "config_type": "dict"}
    return FedOptRecipe(**_of_recipe(settings, name), device="cpu", optimizer_args=optimizer)


def _cyclic(settings: JobSettings, name: str) -> Any:
    from nvflare.app_opt.pt.recipes.cyclic import CyclicRecipe  # noqa: PLC0415 - an extra

    return CyclicRecipe(**_of_recipe(settings, name))


def _scatter_and_gather(settings: JobSettings, name: str) -> Any:
    """Return a job that continues without one of its sites."""
    from nvflare.app_common.aggregators import InTimeAccumulateWeightedAggregator  # noqa: PLC0415 - an extra
    from nvflare.app_common.shareablegenerators import FullModelShareableGenerator  # noqa: PLC0415
    from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather  # noqa: PLC0415
    from nvflare.app_opt.pt.job_config.base_fed_job import BaseFedJob  # noqa: PLC0415
    from nvflare.app_opt.pt.job_config.model import PTModel  # noqa: PLC0415
    from nvflare.job_config.script_runner import ScriptRunner  # noqa: PLC0415

    job = BaseFedJob(name=name, min_clients=settings.sites - 1)
    persistor = job.to_server(PTModel(_model(settings)))["persistor_id"]
    generator = job.to_server(FullModelShareableGenerator(), id="shareable_generator")
    aggregator = job.to_server(InTimeAccumulateWeightedAggregator(expected_data_kind="WEIGHTS"), id="aggregator")
    controller = ScatterAndGather(
        min_clients=settings.sites - 1,
        num_rounds=settings.rounds,
        wait_time_after_min_received=settings.patience,
        aggregator_id=aggregator,
        persistor_id=persistor,
        shareable_generator_id=generator,
        ignore_result_error=True,
    )
    job.to_server(controller)
    script = str(HERE / "site_script.py")
    runner = ScriptRunner(script, settings.script_arguments, launch_external_process=settings.external)
    job.to_clients(runner)
    return job


def run_job(job: Any, settings: JobSettings, workspace: Path) -> None:
    """Run a recipe or a FedJob in the simulator, in this process's children. Raises RuntimeError if the job fails."""
    from nvflare.recipe import SimEnv  # noqa: PLC0415 - an extra

    environment = SimEnv(num_clients=settings.sites, workspace_root=str(workspace))
    if hasattr(job, "execute"):
        job.execute(environment)
    else:
        environment.deploy(job)
