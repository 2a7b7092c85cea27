# SPDX-License-Identifier: Apache-2.0
"""Damage of every kind is harmless, reported or refused: no other number, no traceback, and the doctor knows.

The long form is `python -m fedvitals_studies.corruption`.
"""

import pytest

from fedvitals_studies.corruption.damage import KINDS
from fedvitals_studies.corruption.study import Study

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return Study(tmp_path_factory.mktemp("corruption"), brief=True)


@pytest.mark.parametrize("kind", KINDS)
def test_no_damage_goes_unnoticed(study, kind):
    case = study.run(kind, seed=0)
    assert case.outcome in ("harmless", "reported", "refused"), case.why
