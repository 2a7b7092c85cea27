# SPDX-License-Identifier: Apache-2.0
"""Flower: one line on each side.

    app = ClientApp(mods=[fv.flower.client_mod()])
    strategy = fv.flower.attach(FedAvg(...), fv.Monitor("runs.db"))

See docs/flower.md.
"""

from __future__ import annotations

from fedvitals.hosts.flower.attach import attach
from fedvitals.hosts.flower.client_mod import client_mod

__all__ = ["attach", "client_mod"]
