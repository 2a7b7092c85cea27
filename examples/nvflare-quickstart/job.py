# SPDX-License-Identifier: Apache-2.0
"""The federation: FedAvg over six sites, in NVFlare's simulator."""

import argparse

import torch
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from task import DigitsModel

import fedvitals as fv


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ill", default="", help="the site whose labels somebody has mixed up, for example site-3")
    parser.add_argument("--external", action="store_true", help="each site trains in a process of its own")
    options = parser.parse_args()

    torch.manual_seed(0)
    recipe = FedAvgRecipe(
        name="digits",
        model=DigitsModel(),
        min_clients=options.sites,
        num_rounds=options.rounds,
        train_script="client.py",
        train_args=f"--sites {options.sites} --ill {options.ill or 'nobody'}",
        launch_external_process=options.external,
    )
    fv.nvflare.attach(recipe, "runs.db")  # fedvitals: the one line
    run = recipe.execute(SimEnv(num_clients=options.sites, workspace_root="workspace"))
    print("The job's folder:", run.get_result())  # noqa: T201


if __name__ == "__main__":
    main()
