# SPDX-License-Identifier: Apache-2.0
"""Every host holds the contract of hosts, and the contract notices a host that does not."""

import pytest

from fedvitals.testing import check_host
from support.hosts.lab_runs import LabHost
from support.hosts.plain_loop import LoopHost

EVERY = (
    "identity", "late and lost replies", "hostile telemetry", "restart", "fork", "close twice",
    "rounds without a barrier",
)  # fmt: skip


def check(driver):
    """Checks that all pass but those that the driver says it has no such thing for, with the reason shown."""
    outcome = check_host(driver)
    assert tuple(outcome) == EVERY
    for name, words in outcome.items():
        assert words == (f"left out: {driver.cannot[name]}" if name in driver.cannot else "passed")


def test_a_plain_loop():
    check(LoopHost())


def test_the_lab():
    check(LabHost())


def test_flower():
    pytest.importorskip("flwr", reason="needs flwr: pip install 'fedvitals[flower]'")
    from support.hosts.flower_grid import FlowerHost

    check(FlowerHost())


@pytest.mark.nvflare
@pytest.mark.thorough
def test_nvflare():
    pytest.importorskip("nvflare", reason="needs nvflare: pip install 'fedvitals[nvflare]'")
    from support.hosts.nvflare_simulator import NVFlareHost

    check(NVFlareHost())
