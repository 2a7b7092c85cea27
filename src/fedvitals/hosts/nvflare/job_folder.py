# SPDX-License-Identifier: Apache-2.0
"""Watch a job given as a folder: write our components into its configuration.

NVFlare reads JSON, HOCON and YAML; the folders it writes are JSON, and only these are changed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedvitals.errors import ConfigError
from fedvitals.hosts.nvflare import filters
from fedvitals.hosts.watch_settings import WatchSettings, absolute_store

SERVER_FILE, SITE_FILE = "config_fed_server.json", "config_fed_client.json"
SERVER_PATH = "fedvitals.hosts.nvflare.server_component.ServerWatch"
SITE_PATH = "fedvitals.hosts.nvflare.site.component.SiteWatch"
ID = "fedvitals"


def watch_folder(folder: Path, settings: WatchSettings) -> None:
    """Write our components into a job's folder, unless they are there. Raises ConfigError if it is not a job folder."""
    files = [*_config_files(folder)]
    servers = [file for file in files if file.name == SERVER_FILE]
    if not servers:
        raise ConfigError(
            f"{folder} is no folder of an NVFlare job: it has no */config/{SERVER_FILE}. A recipe's script writes one "
            "by `python job.py --export`; a job in HOCON or YAML needs fv.nvflare.attach in its script."
        )
    configs = {file: json.loads(file.read_text(encoding="utf-8")) for file in files}
    if any(_is_watched(configs[file]) for file in servers):
        return  # its script already uses fedvitals
    names = [*dict.fromkeys(name for file in files if file.name == SITE_FILE for name in _filters(configs[file]))]
    shared = {"probes": settings.probes, "privacy": settings.privacy}
    server = {
        **shared, "store": absolute_store(settings.store), "run": settings.run or _job_name(folder),
        "guard": settings.guard, "filters": names or None, "tracebacks": settings.tracebacks or None,
    }  # fmt: skip
    site = {**shared, "tracebacks": settings.tracebacks}
    for file, config in configs.items():
        path, arguments = (SERVER_PATH, server) if file.name == SERVER_FILE else (SITE_PATH, site)
        args = {name: value for name, value in arguments.items() if value is not None}
        config.setdefault("components", []).append({"id": ID, "path": path, "args": args})
        file.write_text(json.dumps(config, indent=4), encoding="utf-8")


def _config_files(folder: Path) -> Iterator[Path]:
    for name in (SERVER_FILE, SITE_FILE):
        yield from sorted(folder.glob(f"*/config/{name}"))


def _is_watched(config: Mapping[str, Any]) -> bool:
    sets: Iterable[Any] = config.get("task_result_filters") or ()
    paths = [entry.get("path") for entry in config.get("components") or ()]
    paths += [entry.get("path") for task_set in sets for entry in task_set.get("filters") or ()]
    return SERVER_PATH in paths


def _filters(config: Mapping[str, Any]) -> list[str]:
    """Return the class names of a site's filters on its results, as far as we know them."""
    sets: Iterable[Any] = config.get("task_result_filters") or ()
    entries = [entry for task_set in sets for entry in task_set.get("filters") or ()]
    names = [str(entry.get("path") or entry.get("name") or "").rpartition(".")[2] for entry in entries]
    return [name for name in names if name in filters.KNOWN]


def _job_name(folder: Path) -> str:
    try:
        return str(json.loads((folder / "meta.json").read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name
