# SPDX-License-Identifier: Apache-2.0
"""The folder whose `sitecustomize.py` lets fedvitals watch the processes that a framework starts.

Each Python process that has it on its path runs that file. It is added by the commands `fedvitals flower` and
`fedvitals nvflare`, and by the component of an NVFlare site for the training scripts that the site starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SITE_FOLDER = Path(__file__).resolve().with_name("site")


def with_site_folder(inherited: Mapping[str, str]) -> str:
    """Return the PYTHONPATH of an environment, with the folder first."""
    path = inherited.get("PYTHONPATH", "")
    if path.split(os.pathsep)[0] == str(SITE_FOLDER):
        return path
    return f"{SITE_FOLDER}{os.pathsep}{path}" if path else str(SITE_FOLDER)
