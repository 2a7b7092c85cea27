# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer: one line.

    Trainer(max_epochs=3, callbacks=[fv.lightning.Callback("runs.db")])

See docs/trainers.md.
"""

from __future__ import annotations

from fedvitals.hosts.lightning.callback import Callback

__all__ = ["Callback"]
