# SPDX-License-Identifier: Apache-2.0
"""For tests, ours and yours: a sink in memory, tiny federations, and checks for plug-ins of fedvitals.

Your own probe, sink, detector, topology or host fulfils its contract if the check of that name returns; a violation
raises an AssertionError that describes it. Needs no test framework.
"""

from fedvitals.testing.host_contract import HostDriver, check_host
from fedvitals.testing.memory_sink import MemorySink
from fedvitals.testing.plugin_contracts import (
    check_detector,
    check_probe,
    check_sink,
    check_topology,
    examples_of_records,
    tiny_run,
)
from fedvitals.testing.scripted_federation import ScriptedError, ScriptedFederation

__all__ = [
    "HostDriver",
    "MemorySink",
    "ScriptedError",
    "ScriptedFederation",
    "check_detector",
    "check_host",
    "check_probe",
    "check_sink",
    "check_topology",
    "examples_of_records",
    "tiny_run",
]
