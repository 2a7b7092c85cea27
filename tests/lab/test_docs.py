# SPDX-License-Identifier: Apache-2.0
"""What docs/lab.md says of the lab is so: its snippets run, and every kind that there is has a word there."""

from __future__ import annotations

import re

import pytest

from fedvitals import lab
from fedvitals.lab.compression import COMPRESSIONS
from fedvitals.lab.description import kind_of
from fedvitals.lab.models.catalog import MODELS
from fedvitals.lab.network.profiles import DEVICES, LINKS
from fedvitals.lab.stacked.plans import PRECISIONS
from support.paths import ROOT

PAGE = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
GPU = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_every_kind_is_named():
    named = set(re.findall(r"`([a-z0-9_]+)`", PAGE))
    assert {*lab.KINDS, *LINKS, *DEVICES} - named == set()


def test_python_and_toml_describe_the_same_experiment():
    python, toml = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[1] for kind in ("python", "toml"))
    scope = {}
    exec(python[: python.index("with fv.Monitor")], scope)
    assert scope["experiment"] == lab.read(toml) == lab.read(scope["experiment"].to_toml())


@pytest.mark.thorough
def test_first_snippet_runs_as_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippet = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    exec(snippet.replace("rounds=15", "rounds=6").replace("iterations=20", "iterations=2"), {})
    assert 'kind = "label_noise"' in capsys.readouterr().out
    assert (tmp_path / "runs.db").exists()


def test_backdoor_snippet_plants_one():
    snippets = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (fault,) = lab.read(next(text for text in snippets if "backdoor" in text)).faults
    assert (type(fault), fault.nodes, fault.ramp) == (lab.DistributedBackdoor, ("c1", "c4", "c7"), 4)


def test_network_snippet_makes_a_network():
    snippet = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[2]
    scope = {"lab": lab}
    exec(snippet, scope)
    e = lab.Experiment(network=scope["network"])
    assert lab.read(e.to_toml()) == e


def test_lines_of_the_gossip_snippet_stand_in_the_example():
    snippet = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    example = (ROOT / "examples" / "gossip.py").read_text(encoding="utf-8")
    for line in snippet.splitlines():
        assert line.strip() == "..." or line in example


def test_the_page_on_gpus_says_of_every_model_and_compression_where_it_runs():
    named = set(re.findall(r"`([a-z0-9_]+)`", GPU))
    assert {kind_of(kind.__name__) for kind in (*MODELS, *COMPRESSIONS)} - named == set()
    assert {*PRECISIONS} - set(re.findall(r"\w+", GPU)) == set()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https:)([^)#]+)[^)]*\)", PAGE + GPU))))
def test_links_lead_somewhere(link):
    assert (ROOT / "docs" / link).exists()
