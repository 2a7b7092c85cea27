# SPDX-License-Identifier: Apache-2.0
"""Attach fedvitals to an NVFlare recipe or job: one component on the server, one on each site."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from nvflare.apis.job_def import ALL_SITES, SERVER_SITE_NAME
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.recipe.spec import Recipe

from fedvitals.diagnosis.corrections.policy import correction_policy_of
from fedvitals.errors import ConfigError
from fedvitals.hosts import update_guard
from fedvitals.hosts.nvflare import filters
from fedvitals.hosts.nvflare.server_component import ServerWatch
from fedvitals.hosts.nvflare.site.component import SiteWatch
from fedvitals.hosts.watch_settings import absolute_store
from fedvitals.probes.presets import check_name
from fedvitals.transport.privacy import policy_for

What = TypeVar("What")
TASKS = ["fedvitals"]  # a task that does not exist: our components are filters only to receive events
PACKAGE = "fedvitals"


def attach(
    what: What,
    store: str | os.PathLike[str] = "runs.db",
    *,
    run: str | None = None,
    probes: str = "standard",
    privacy: int | None = None,
    tracebacks: bool = False,
    guard: str = update_guard.REPORT,
    cure: str | None = None,
    trainers: bool = True,
) -> What:
    """Let fedvitals watch a recipe or a FedJob; call it before `execute`, `run` or `export`.

    Args:
        what: The recipe or the FedJob.
        store: A file of the server's machine, or postgresql://...; a relative path is relative to this process's
            folder.
        run: A name for people, by default the job's.
        probes: «light», «standard» or «deep», for `fv.watch` in a site's script.
        privacy: What may leave a site, and be kept, 0 to 4, by default 2; a site's own FEDVITALS_PRIVACY may lower
            it.
        tracebacks: Whether sites send the traceback of an exception, which may quote data.
        guard: What to do with a result that contains NaN or infinity: «report», «drop» or «fail».
        cure: As in `fv.Monitor`.
        trainers: Whether to watch training scripts in processes of their own, too.

    Returns:
        The same object as `what`.
    """
    job = _job_of(what)
    if any(isinstance(watch, ServerWatch) for watch in _filters_of(job, server=True)):
        raise ConfigError(f"This {type(what).__name__} is watched already; attach once only.")
    update_guard.check_guard(guard)
    check_name(probes)
    policy_for("nvflare", privacy, tracebacks=tracebacks)
    if cure is not None:
        correction_policy_of(cure)
    names = filters.names_of(_filters_of(job, server=False))
    if filters.encrypting(names) and privacy is not None and privacy > filters.LEVEL:
        raise ConfigError(
            f"attach(privacy={privacy}) would reveal single sites, and {filters.encrypting(names)[0]} hides them: "
            f"at most level {filters.LEVEL} goes with it. Leave privacy= out."
        )
    server = ServerWatch(
        absolute_store(store), run or job.name, probes, privacy, tracebacks or None, guard, cure, names or None
    )
    site = SiteWatch(probes, privacy, tracebacks, trainers)
    _add(what, job, server, site)
    # Without this, NVFlare would copy our files into the job, where they would hide the installed package.
    job.set_app_packages([*dict.fromkeys((*(job.job.app_packages or ()), PACKAGE))])
    return what


def _job_of(what: Any) -> FedJob:
    if isinstance(what, FedJob):
        return what
    job = getattr(what, "_job", None)
    if isinstance(what, Recipe) and isinstance(job, FedJob):
        return job
    raise ConfigError(
        f"attach() takes a recipe of NVFlare (nvflare.recipe) or a FedJob, before it is run; got a "
        f"{type(what).__name__}. For a job's folder: fedvitals nvflare run FOLDER."
    )


def _add(what: Any, job: FedJob, server: ServerWatch, site: SiteWatch) -> None:
    if isinstance(what, Recipe):
        what.add_client_output_filter(site, tasks=TASKS)
        what.add_server_input_filter(server, tasks=TASKS)
        return
    sites = _site_names(job)
    for target in sites:
        job.to(site, target, filter_type=FilterType.TASK_RESULT, tasks=TASKS)
    if not sites:
        job.to_clients(site, filter_type=FilterType.TASK_RESULT, tasks=TASKS)
    job.to_server(server, filter_type=FilterType.TASK_RESULT, tasks=TASKS)


def _site_names(job: FedJob) -> list[str]:
    """Return the sites that have apps of their own; empty if all sites share one."""
    return [target for target in _apps(job) if target not in (ALL_SITES, SERVER_SITE_NAME)]


def _apps(job: FedJob) -> dict[str, Any]:
    return getattr(job, "_deploy_map", None) or {}


def _filters_of(job: FedJob, *, server: bool) -> list[Any]:
    """Return the filters on results in the job: those of its server, or those of its sites."""
    apps = [app for target, app in _apps(job).items() if (target == SERVER_SITE_NAME) == server]
    return [entry for app in apps for _, own in app.app_config.task_result_filters for entry in own]
