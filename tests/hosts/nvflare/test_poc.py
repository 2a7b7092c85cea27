# SPDX-License-Identifier: Apache-2.0
"""A provisioned deployment on one machine, NVFlare's POC mode: server, sites and jobs are processes of their own."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'fedvitals[nvflare]'")
pytest.importorskip("torch")

from fedvitals.store import open_reader
from fedvitals.store.read import queries

pytestmark = [pytest.mark.nvflare, pytest.mark.slow]

SCRIPT = """
import sys
from nvflare.recipe import PocEnv
import fedvitals as fv
from fedvitals_studies.nvflare.jobs import JobSettings, make_job

recipe = make_job(JobSettings("fedavg", sites=2, rounds=2))
fv.nvflare.attach(recipe, sys.argv[1])
environment = PocEnv(num_clients=2)
try:
    print("ended:", recipe.execute(environment).get_result(timeout=400))
finally:
    environment.stop(clean_up=True)
"""


def test_a_job_of_a_deployment_is_watched_under_its_own_id(tmp_path):
    environment = {**os.environ, "NVFLARE_POC_WORKSPACE": str(tmp_path / "poc")}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "runs.db")]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    with open_reader(tmp_path / "runs.db") as reader:
        (run,) = queries.list_runs(reader)
        assert run.id.startswith("nvflare-")
        assert (run.host, run.rounds, run.clients) == ("nvflare", 2, 2)
        assert run.finished is not None
        history = reader.history(run.id)
        for name in ("update.norm", "gradient.norm", "steps", "time.client"):
            assert {*history.latest(name, 1)} >= {"site-1", "site-2"}, name
