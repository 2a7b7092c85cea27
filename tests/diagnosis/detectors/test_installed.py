# SPDX-License-Identifier: Apache-2.0
"""Detectors of other distributions: used when they are named, left out when they are broken."""

import re
import subprocess
import sys

import pytest

import fedvitals as fv
from fedvitals.diagnosis.examine import DETECTORS, choose_detectors
from fedvitals.store import open_reader
from fedvitals.testing import MemorySink
from fedvitals.views.gaps import gaps_of
from support.plugins import install

SEES_EVERYBODY = """
import fedvitals as fv

def detect(history, round_index):
    for node in history.latest("loss", round_index):
        yield fv.Finding(fv.Where("", round_index, node), 0, "ACME", "warning", 0.5, f"{node} was seen")

def silent(history, round_index):
    return ()

BOTH = [detect, silent]
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Writes a distribution that offers detectors, and takes its module out of this process again."""
    modules = []

    def write(module, code, **detectors):
        install(tmp_path / "installed", module, code, detectors=detectors)
        monkeypatch.syspath_prepend(tmp_path / "installed")
        modules.append(module)

    yield write
    for module in modules:
        sys.modules.pop(module, None)


def small_run(store=None, **settings):
    with fv.Monitor(store, "d", **settings) as monitor:
        for number in range(2):
            with monitor.round(number):
                for node in ("c0", "c1"):
                    monitor.log(loss=1.0, node=node)
    return monitor


def also_mine(history, number):
    yield fv.Finding(fv.Where("", number), 0, "MINE", "note", 0.5, "round seen")


def test_named_detector_looks(installed):
    installed("acme_one", SEES_EVERYBODY, acme="detect")
    found = small_run(detectors=["acme"], strict=True).findings()
    assert sorted((f.where.round, f.where.node) for f in found) == [(0, "c0"), (0, "c1"), (1, "c0"), (1, "c1")]
    assert (found.installed, found.gaps) == (1, ())


def test_names_sets_and_functions_may_be_mixed(installed):
    installed("acme_two", SEES_EVERYBODY, acme="BOTH")
    chosen = choose_detectors(["standard", "acme", also_mine])
    assert len(chosen) == len(DETECTORS) + 3
    assert [detector.__name__ for detector in chosen[-3:]] == ["acme.detect", "acme.silent", "also_mine"]
    found = small_run(detectors=["standard", "acme", also_mine], strict=True).findings(notes=True)
    assert {finding.issue for finding in found} >= {"ACME", "MINE"}


@pytest.mark.thorough
def test_plugin_that_is_not_named_is_not_imported(tmp_path):
    """Nor does it run: in a process that trains with the standard detectors, its module is never loaded."""
    install(tmp_path, "acme_unasked", "raise RuntimeError('imported')", detectors={"acme": "detect"})
    code = (
        "import sys\nsys.path.insert(0, sys.argv[1])\nimport fedvitals as fv\n"
        "with fv.Monitor(None, detectors=['standard', lambda history, number: ()], strict=True) as monitor:\n"
        "    with monitor.round(0):\n        monitor.log(loss=1.0, node='c0')\n"
        "assert monitor.findings().gaps == ('no client has completed a round',)\n"
        "assert 'acme_unasked' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_unknown_name_is_answered_with_shipped_and_installed_ones(installed):
    installed("acme_three", SEES_EVERYBODY, acme="detect")
    with pytest.raises(fv.errors.ConfigError, match=r"Unknown set of detectors 'acm'. Known: acme, standard. Did you"):
        fv.Monitor(None, detectors=["standard", "acm"])
    assert "acme_three" not in sys.modules


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import missing_package", "of acme_broken cannot be loaded (ModuleNotFoundError"),
        ("def other(): ...", "of acme_broken cannot be loaded (AttributeError"),
        ("raise SystemExit(1)", "of acme_broken cannot be loaded (SystemExit"),
        ("def detect(history): ...", "is not a function of (history, round_index)"),
        ("detect = 3", "is not a function of (history, round_index)"),
        ("def detect(history, round_index): return [1 / 0]", "ZeroDivisionError"),
        ("def detect(history, round_index): return ['c0 is ill']", "which is not a Finding"),
        ("def detect(history, round_index): ...", "TypeError"),
    ],
)
def test_broken_plugin_is_named_and_left_out(installed, tmp_path, caplog, code, reason):
    """Training and the other detectors go on; neither the monitor nor the store gives an all-clear."""
    installed("acme_broken", code, acme="detect")
    sink, store = MemorySink(), tmp_path / "runs.db"
    monitor = small_run(store, detectors=["acme", also_mine], sinks=[sink])
    assert monitor.lost == 0
    found = monitor.findings(notes=True)
    assert [finding.issue for finding in found] == ["MINE", "MINE"]
    (failed,) = found.gaps
    assert re.match(r"the detector 'acme' failed in round [01] \(\w+Error\)$", failed)
    (event,) = [record for record in sink.records if isinstance(record, fv.Event) and record.name == "monitor.error"]
    assert event.message.startswith("the detector 'acme'")
    assert reason in event.message
    assert [reason in line.getMessage() for line in caplog.records] == [True]
    with open_reader(store) as reader:
        assert gaps_of(reader, monitor.run.id) == found.gaps


def test_no_all_clear_where_the_only_detector_is_broken(installed):
    installed("acme_alone", "import missing_package", acme="detect")
    found = small_run(detectors=["acme"]).findings()
    assert str(found).startswith("No findings, but not fully examined: the detector 'acme' failed")
