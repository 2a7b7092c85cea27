# SPDX-License-Identifier: Apache-2.0
"""What watching adds to the processor time of NVFlare's rounds: `python -m fedvitals_studies.nvflare.cost`.

One job, whose rounds are without and with fedvitals in turn. A watched round, summed over the server and all sites, is
compared with the mean of its two neighbours without; printed are the median over the pairs and its 95 % interval.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvitals_studies.bench.flower.cost import percent_over_neighbours

BAR = 3.0  # per cent
WARM_UP = 4  # rounds at the beginning that are excluded: compilation, first tables


def make_job(folder: Path, *, sites: int, rounds: int, site: Any) -> Any:
    """Return the job, whose processes write their diaries into the folder. `site`: the training component."""
    from nvflare.app_common.aggregators import InTimeAccumulateWeightedAggregator  # noqa: PLC0415 - an extra
    from nvflare.app_common.shareablegenerators import FullModelShareableGenerator  # noqa: PLC0415
    from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather  # noqa: PLC0415
    from nvflare.job_config.api import FedJob  # noqa: PLC0415
    from nvflare.job_config.defs import FilterType  # noqa: PLC0415

    from fedvitals_studies.nvflare import alternating_job  # noqa: PLC0415

    job = FedJob(name="cost", min_clients=sites)
    job.set_app_packages(["fedvitals"])
    controller = ScatterAndGather(
        min_clients=sites,
        num_rounds=rounds,
        aggregator_id=job.to_server(InTimeAccumulateWeightedAggregator(expected_data_kind="WEIGHTS"), id="aggregator"),
        persistor_id=job.to_server(alternating_job.FirstModel(), id="persistor"),
        shareable_generator_id=job.to_server(FullModelShareableGenerator(), id="shareable_generator"),
        task_check_period=0.1,
    )
    job.to_server(controller)
    server = alternating_job.AlternatingServerWatch(str(folder), str(folder / "runs.db"))
    job.to_server(server, filter_type=FilterType.TASK_RESULT, tasks=["fedvitals"])
    job.to_clients(site, tasks=["train"])
    watch = alternating_job.AlternatingSiteWatch(str(folder))
    job.to_clients(watch, filter_type=FilterType.TASK_RESULT, tasks=["fedvitals"])
    return job


def seconds_of_rounds(diaries: Sequence[Path]) -> list[float]:
    """Return the processor seconds of each round but the last, summed over all processes."""
    sums: dict[int, float] = {}
    for diary in diaries:
        lines = [json.loads(line) for line in diary.read_text(encoding="utf-8").splitlines()]
        for line, following in itertools.pairwise(lines):
            sums[line["round"]] = sums.get(line["round"], 0.0) + following["cpu"] - line["cpu"]
    return [sums[round_index] for round_index in sorted(sums)]


def main() -> None:
    """Run the job and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--measures-steps", action="store_true", help="with fv.watch in the sites' training")
    options = parser.parse_args()
    from nvflare.recipe import SimEnv  # noqa: PLC0415 - an extra

    from fedvitals_studies.nvflare.alternating_job import TrainingSite  # noqa: PLC0415 - as above

    with tempfile.TemporaryDirectory(prefix="nvflare-cost-") as name:
        folder, rounds = Path(name), WARM_UP + 2 * options.pairs + 2
        site = TrainingSite(options.steps, options.batch, options.measures_steps)
        job = make_job(folder, sites=options.sites, rounds=rounds, site=site)
        SimEnv(num_clients=options.sites, workspace_root=str(folder / "workspace")).deploy(job)
        diaries = [*folder.glob("*.jsonl")]
        seconds = seconds_of_rounds(diaries)[WARM_UP:]
        of_server = seconds_of_rounds([diary for diary in diaries if diary.stem == "server"])[WARM_UP:]
    bare, watched = seconds[::2], seconds[1::2]
    added = np.median(watched) - np.median(bare)
    added_by_server = np.median(of_server[1::2]) - np.median(of_server[::2])
    value, low, high = percent_over_neighbours(bare, watched)
    verdict = "met" if value <= BAR else "missed"
    mean, how = sum(bare) / len(bare), "with fv.watch" if options.measures_steps else "without fv.watch"
    print(  # noqa: T201
        f"1 M parameters, {options.sites} sites, {options.steps} steps of {options.batch}, {how}: {len(watched)} pairs "
        f"of rounds, {mean:.2f} processor seconds a round; watched / not watched: {1 + value / 100:.4f} "
        f"({1 + low / 100:.4f} to {1 + high / 100:.4f}), bar {1 + BAR / 100:.2f}: {verdict}; added {1000 * added:.0f} "
        f"ms a round, {1000 * added_by_server:.0f} of them in the server"
    )


if __name__ == "__main__":
    main()
