# SPDX-License-Identifier: Apache-2.0
"""Topologies and a network in which everything takes time."""

from __future__ import annotations

from fedvitals import lab
from fedvitals.lab.network.profiles import Device, Link

TOPOLOGIES = {
    "centralized": lab.Centralized(),
    "hierarchical": lab.Hierarchical(edges=3),
    "clustered": lab.Clustered(threshold=0.3, smallest=2, every=2),
    "rings": lab.Rings(rings=3),
}


BUSY = lab.Network(  # something of every sort that takes time
    links={"4g": 0.5, "slow": 0.5},
    devices="tablet",
    profiles={"slow": Link(1e6, 2e5, latency_seconds=0.1), "tablet": Device(1e8, 2**30, samples_per_second=200.0)},
    spread=0.4,
    jitter=0.3,
    availability=0.9,
    server="tablet",
    server_bits_per_second=5e5,
    edge_links="4g",
)
