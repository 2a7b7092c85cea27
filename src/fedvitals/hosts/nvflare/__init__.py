# SPDX-License-Identifier: Apache-2.0
"""NVFlare: one line for a recipe or a job.

    fv.nvflare.attach(recipe, "runs.db")

See docs/nvflare.md.
"""

from __future__ import annotations

from fedvitals.hosts.nvflare.attach import attach

__all__ = ["attach"]
