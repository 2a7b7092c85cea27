# SPDX-License-Identifier: Apache-2.0
"""The settings of apps and jobs that are watched without a line of ours, as environment variables that all their
processes inherit.

This module loads neither a framework nor torch: commands set the environment (`fedvitals flower`, `fedvitals nvflare`),
and the processes that the framework starts read it (`hosts.flower.unmodified`, `hosts.nvflare.unmodified`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedvitals.errors import ConfigError
from fedvitals.hosts.startup_path import with_site_folder
from fedvitals.store import store_target

FLOWER, NVFLARE = "FEDVITALS_FLOWER", "FEDVITALS_NVFLARE"  # which of them is watched
VARIABLE_NAMES = {
    "store": "FEDVITALS_STORE",
    "run": "FEDVITALS_RUN",
    "probes": "FEDVITALS_PROBES",
    "privacy": "FEDVITALS_PRIVACY",
    "tracebacks": "FEDVITALS_TRACEBACKS",
    "tape": "FEDVITALS_TAPE",
    "guard": "FEDVITALS_GUARD",
}


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """The settings that can be set without changing code. None: the default."""

    store: str | None = None
    run: str | None = None
    probes: str | None = None
    privacy: int | None = None
    tracebacks: bool | None = None
    tape: str | None = None  # for Flower: the folder of clients' tapes; the server's lies beside its store
    guard: str | None = None  # for NVFlare: what happens to unusable updates

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> WatchSettings:
        """Return the settings of these environment variables; an empty variable counts as unset."""
        values: dict[str, Any] = {name: environment.get(variable) for name, variable in VARIABLE_NAMES.items()}
        values = {name: value for name, value in values.items() if value}
        if "privacy" in values:
            if not values["privacy"].isdecimal():
                raise ConfigError(f"{VARIABLE_NAMES['privacy']} is a level from 0 to 4, got '{values['privacy']}'.")
            values["privacy"] = int(values["privacy"])
        if "tracebacks" in values:
            values["tracebacks"] = values["tracebacks"] != "0"
        return cls(**values)

    def variables(self, inherited: Mapping[str, str], switch: str) -> dict[str, str]:
        """Return the variables that make a process, and all that it starts, watched. `switch`: FLOWER or NVFLARE.

        `inherited`: the environment they are added to, whose values apply where these settings are None.
        """
        settings = {name: value for name, value in asdict(self).items() if value is not None}
        if "tracebacks" in settings:
            settings["tracebacks"] = int(settings["tracebacks"])
        if "tape" in settings:
            settings["tape"] = Path(settings["tape"]).absolute().as_posix()
        named = {VARIABLE_NAMES[name]: str(value) for name, value in settings.items()}
        return {switch: "1", "PYTHONPATH": with_site_folder(inherited), **named}


def absolute_store(store: str | os.PathLike[str] | None) -> str:
    """Return the store's target so that it works from any folder, because processes have folders of their own."""
    where = store_target(store)
    return where if isinstance(where, str) else str(where.absolute())
