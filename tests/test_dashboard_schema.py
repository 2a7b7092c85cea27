# SPDX-License-Identifier: Apache-2.0
"""The published OpenAPI is true: schemathesis asks everything that it allows, and checks every answer against it."""

from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from fedvitals.dashboard.app import create_app
from shown_runs import small

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="session")
def api(session_folder: Path):
    app = create_app(small(session_folder / "schema.db"))
    return schemathesis.openapi.from_asgi("/api/openapi.json", app)


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_it_says_it_answers_it_answers(case) -> None:
    case.headers = {**(case.headers or {}), "Host": "127.0.0.1", "X-Fedvitals": "1"}
    case.call_and_validate()
