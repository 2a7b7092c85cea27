# SPDX-License-Identifier: Apache-2.0
"""The route that writes a report, asked without a browser."""

import pytest
from starlette.testclient import TestClient

import fedvitals as fv
from fedvitals.dashboard.app import create_app

pytest.importorskip("matplotlib")


def test_modules_beside_a_strangers_store_are_not_run(tmp_path, monkeypatch):
    """The folder of the store, where the dashboard was started, holds modules named like the standard library's."""
    with fv.Monitor(tmp_path / "runs.db", run="theirs", machine=False) as monitor, monitor.round(0):
        pass
    for module in ("html", "tempfile", "fedvitals"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    with TestClient(create_app(tmp_path / "runs.db"), base_url="http://127.0.0.1") as client:
        answer = client.get("/api/report", params={"runs": "theirs"})
    assert not (tmp_path / "was_run").exists()
    assert answer.status_code == 200, answer.text
    assert "theirs" in answer.text
