# SPDX-License-Identifier: Apache-2.0
"""Watch a job without changing its script: the handler to which `hosts/site/` redirects the creation of job folders.

NVFlare creates a folder for each job, whether it is exported, submitted or simulated. Then our two components are
written into its configuration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedvitals.hosts.nvflare.job_folder import watch_folder
from fedvitals.hosts.watch_settings import WatchSettings

logger = logging.getLogger("fedvitals")


def generate_job_config(original: Callable[..., Any], config: Any, job_root: Any, *more: Any, **others: Any) -> Any:
    """Call `FedJobConfig.generate_job_config`, and add our components to the job that it wrote."""
    outcome = original(config, job_root, *more, **others)
    try:
        watch_folder(Path(job_root) / str(config.job_name), WatchSettings.read(os.environ))
    except Exception as error:  # noqa: BLE001 - the job runs, whatever happens to us
        logger.warning("fedvitals does not watch this job (%s: %s); it runs as usual.", type(error).__name__, error)
    return outcome
