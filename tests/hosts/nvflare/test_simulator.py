# SPDX-License-Identifier: Apache-2.0
"""Whole jobs in NVFlare's simulator: the same model to the last bit, and a site that fails in a process of its own."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'fedvitals[nvflare]'")
torch = pytest.importorskip("torch")

from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.views.cases import cases_of
from fedvitals_studies.nvflare.jobs import JobSettings

pytestmark = [pytest.mark.nvflare, pytest.mark.thorough]

SCRIPT = """
from pathlib import Path
from fedvitals_studies.nvflare.jobs import JobSettings, make_job, run_job
settings = JobSettings("fedavg", sites=2, rounds=2, watched={watched})
run_job(make_job(settings), settings, Path("workspace"))
"""
VERB = "import sys; from fedvitals.cli.main import main; sys.exit(main())"


def start(folder, *command):
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen([sys.executable, *command], cwd=folder, stdout=log, stderr=log)


def finished(process, folder):
    code = process.wait(300)
    assert code == 0, (folder / "log.txt").read_text()[-4000:]


def last_model(folder):
    """The global model that the job ended with."""
    (file,) = folder.glob("workspace/digits/server/simulate_job/app_server/FL_global_model.pt")
    saved = torch.load(file, weights_only=False)
    return saved.get("model", saved)


def test_a_job_without_a_line_is_watched_and_its_model_is_the_same_to_the_last_bit(tmp_path):
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    for folder, watched in ((plain, False), (ours, True)):
        folder.mkdir()
        (folder / "job.py").write_text(SCRIPT.format(watched=watched))
    runs = [start(plain, "job.py"), start(ours, "-c", VERB, "nvflare", "run", "--run", "digits", "job.py")]
    for process, folder in zip(runs, (plain, ours), strict=True):
        finished(process, folder)
    expected, model = last_model(plain), last_model(ours)
    assert [*model] == [*expected]
    assert all(torch.equal(torch.as_tensor(model[name]), torch.as_tensor(expected[name])) for name in expected)
    assert "digits  " in (ours / "log.txt").read_text()  # the summary at the end
    with open_reader(ours / "runs.db") as reader:
        (run,) = queries.list_runs(reader)
        assert (run.host, run.rounds, run.clients) == ("nvflare", 2, 2)
        assert not cases_of(reader, run.id)
        cohorts = [event.data for event in queries.events(reader, run.id, name="cohort")]
        assert [(data["asked"], sorted(data["answered"])) for data in cohorts] == [(["site-1", "site-2"],) * 2] * 2
        history = reader.history(run.id)
        for name in ("update.norm", "gradient.norm", "steps", "loss", "time.client"):
            assert {*history.latest(name, 1)} >= {"site-1", "site-2"}, name


def test_a_site_that_fails_in_a_process_of_its_own_is_named_with_its_traceback_and_the_job_goes_on(tmp_path):
    settings = JobSettings("scatter-and-gather", sites=3, rounds=2, fault="fail", since=1, external=True)
    (tmp_path / "settings.json").write_text(json.dumps(asdict(settings)))
    finished(start(tmp_path, "-m", "fedvitals_studies.nvflare.faults", "--one", str(tmp_path)), tmp_path)
    with open_reader(tmp_path / "runs.db") as reader:
        (run,) = queries.list_runs(reader)
        first = next(iter(queries.events(reader, run.id, name="client.failed")))
        assert (first.where.node, first.where.round, first.data["exception"]) == ("site-3", 1, "PlantedError")
        assert "in plant" in first.data["traceback"]
        assert {case.node for case in cases_of(reader, run.id)} == {"site-3"}
        assert [case.issue for case in cases_of(reader, run.id)] == ["CRASH"]
        assert {*reader.history(run.id).latest("gradient.norm", 1)} == {"site-1", "site-2"}
