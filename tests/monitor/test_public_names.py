# SPDX-License-Identifier: Apache-2.0
"""What users see of a monitor: few names, each of them documented. Everything else is for hosts: `monitor.host`."""

import re

import fedvitals as fv
from fedvitals.monitor.host import HostObserver
from fedvitals.protocols import NullObserver, Observed, Observer, RoundObserver, observer_of
from support.paths import ROOT

NAMES = [
    "client", "close", "corrections", "edge", "exchange", "file", "findings", "flush", "host", "log", "lost", "part",
    "round", "run", "transfer", "transformed", "updates",
]  # fmt: skip


def public(of: object) -> list[str]:
    return sorted(name for name in dir(of) if not name.startswith("_"))


def test_a_monitor_shows_these_names_and_no_others():
    with fv.Monitor(None) as monitor:
        assert public(monitor) == NAMES


def test_every_public_name_of_a_monitor_is_documented():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert [name for name in NAMES if not re.search(rf"\bmonitor\.{name}\b", text)] == []


def test_a_host_takes_a_monitor_an_observer_or_nothing():
    with fv.Monitor(None) as monitor:
        assert isinstance(monitor, Observed)
        assert observer_of(monitor) is monitor.host
        assert isinstance(observer_of(monitor.host), HostObserver)
        assert isinstance(observer_of(None), NullObserver)
        assert isinstance(monitor.host, Observer)


def test_recognising_an_observer_opens_nothing(tmp_path):
    with fv.Monitor(tmp_path / "runs.db") as monitor:
        assert isinstance(observer_of(monitor), RoundObserver)
    assert not (tmp_path / "runs.db").exists()
