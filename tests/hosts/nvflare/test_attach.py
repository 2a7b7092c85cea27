# SPDX-License-Identifier: Apache-2.0
"""One line, or none: what is written into a job, and what is refused."""

import json

import pytest

pytest.importorskip("nvflare", reason="needs nvflare: pip install 'fedvitals[nvflare]'")
pytest.importorskip("torch")

from click.testing import CliRunner
from nvflare.apis.filter import Filter
from nvflare.app_common.filters import ExcludeVars, SVTPrivacy
from nvflare.job_config.defs import FilterType

import fedvitals as fv
from fedvitals.cli import nvflare as verb
from fedvitals.errors import ConfigError
from fedvitals.hosts.nvflare import filters
from fedvitals.hosts.nvflare.job_folder import SERVER_PATH, SITE_PATH, watch_folder
from fedvitals.hosts.watch_settings import NVFLARE, WatchSettings
from fedvitals_studies.nvflare.jobs import JobSettings, make_job

ENCRYPTED = "homomorphic encryption"


def exported(job, folder):
    """The configurations of a job's server and sites, and the files of its code."""
    getattr(job, "_job", job).export_job(str(folder))
    return configurations(next(folder.iterdir()))


def configurations(folder):
    server, site = (
        json.loads((folder / f"app/config/config_fed_{side}.json").read_text()) for side in ("server", "client")
    )
    return server, site, sorted(file.name for file in folder.rglob("*.py"))


def components(config):
    entries = [*config["components"], *(entry for set_ in config["task_result_filters"] for entry in set_["filters"])]
    return {entry["path"]: entry["args"] for entry in entries}


@pytest.mark.parametrize("workflow", ["fedavg", "scatter-and-gather", "fedopt", "cyclic"])
def test_recipes_and_jobs_get_one_component_on_each_side_and_none_of_our_files(workflow, tmp_path):
    job = make_job(JobSettings(workflow))
    assert fv.nvflare.attach(job, tmp_path / "runs.db", privacy=1, guard="drop") is job
    server, site, files = exported(job, tmp_path / "job")
    ours = components(server)[SERVER_PATH]
    assert ours == {"store": str(tmp_path / "runs.db"), "run": "digits", "privacy": 1, "guard": "drop"}
    assert components(site)[SITE_PATH] == {"privacy": 1}
    assert "site_script.py" in files
    assert not {"server_component.py", "component.py", "attach.py"} & {*files}


def test_a_relative_store_is_one_of_the_folder_in_which_the_line_was_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = make_job(JobSettings("fedavg"))
    fv.nvflare.attach(job, "runs.db")
    server, _, _ = exported(job, tmp_path / "job")
    assert components(server)[SERVER_PATH]["store"] == str(tmp_path / "runs.db")


def test_what_cannot_be_is_refused_at_once():
    job = make_job(JobSettings("fedavg"))
    for settings, words in (
        ({"guard": "dorp"}, "dorp"),
        ({"privacy": 5}, "level from 0 to 4"),
        ({"probes": "all"}, "all"),
        ({"cure": "perhaps"}, "perhaps"),
    ):
        with pytest.raises(ConfigError, match=words):
            fv.nvflare.attach(job, "runs.db", **settings)
    with pytest.raises(ConfigError, match=r"takes a recipe of NVFlare .* or a FedJob.*got a str"):
        fv.nvflare.attach("job.py", "runs.db")
    fv.nvflare.attach(job, "runs.db")
    with pytest.raises(ConfigError, match="watched already"):
        fv.nvflare.attach(job, "runs.db")


class HEModelEncryptor(Filter):
    """By the name of NVFlare's own, which needs a package for encryption."""

    def process(self, shareable, fl_ctx):
        return shareable


def test_a_filter_that_encrypts_forbids_to_tell_of_single_sites():
    job = make_job(JobSettings("fedavg"))
    job.add_client_output_filter(HEModelEncryptor(), tasks=["train"])
    with pytest.raises(ConfigError, match="HEModelEncryptor hides them"):
        fv.nvflare.attach(job, "runs.db", privacy=2)


def test_the_jobs_filters_are_known_to_the_server(tmp_path):
    job = make_job(JobSettings("fedavg"))
    job.add_client_output_filter(SVTPrivacy(), tasks=["train"])
    fv.nvflare.attach(job, tmp_path / "runs.db")
    server, _, _ = exported(job, tmp_path / "job")
    assert components(server)[SERVER_PATH]["filters"] == ["SVTPrivacy"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], {}),
        (["ConvertWeights", "MyOwn"], {}),
        (["ModelQuantizer"], {"stated": "ModelQuantizer: quantised"}),
        (["HEModelEncryptor"], {"stated": f"HEModelEncryptor: {ENCRYPTED}", "secure_aggregation": ENCRYPTED}),
    ],
)
def test_what_filters_do_to_updates_is_stated(names, expected):
    assert filters.statement(names) == expected


def test_a_folder_is_watched_once_and_a_job_with_our_line_stays_as_it_is(tmp_path):
    job = make_job(JobSettings("scatter-and-gather"))
    job.to_clients(ExcludeVars(["dense"]), filter_type=FilterType.TASK_RESULT, tasks=["train"])
    job.export_job(str(tmp_path / "plain"))
    folder = tmp_path / "plain" / "digits"
    settings = WatchSettings(store=str(tmp_path / "own.db"), privacy=1)
    watch_folder(folder, settings)
    watch_folder(folder, settings)
    server, site, _ = configurations(folder)
    assert [entry["path"] for entry in server["components"]].count(SERVER_PATH) == 1
    ours = components(server)[SERVER_PATH]
    assert ours == {"store": str(tmp_path / "own.db"), "run": "digits", "privacy": 1, "filters": ["ExcludeVars"]}
    assert components(site)[SITE_PATH] == {"privacy": 1}


def test_the_command_says_what_is_missing(tmp_path):
    done = CliRunner().invoke(verb.command, ["run", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    assert "How many sites?" in str(done.exception)
    done = CliRunner().invoke(verb.command, ["run", str(tmp_path), "-n", "2"])
    assert "no folder of an NVFlare job" in str(done.exception)


def test_the_variables_come_back_as_they_were():
    settings = WatchSettings("runs.db", "digits", "deep", 3, True, guard="drop")
    assert WatchSettings.read(settings.variables({}, NVFLARE)) == settings
