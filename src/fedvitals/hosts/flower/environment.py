# SPDX-License-Identifier: Apache-2.0
"""The environment variables by which unmodified Flower apps are watched; all processes of an app inherit them.

This module loads neither Flower nor torch: commands set the environment (`fedvitals flower`), and the app's processes,
which Flower starts, read it (`hosts.flower.unmodified`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedvitals.errors import ConfigError
from fedvitals.store import store_target

SWITCH_VARIABLE = "FEDVITALS_FLOWER"
# Its sitecustomize.py is run by each Python that has this folder on its path.
SITE_FOLDER = Path(__file__).resolve().with_name("site")
VARIABLE_NAMES = {
    "store": "FEDVITALS_STORE",
    "run": "FEDVITALS_RUN",
    "probes": "FEDVITALS_PROBES",
    "privacy": "FEDVITALS_PRIVACY",
    "tracebacks": "FEDVITALS_TRACEBACKS",
    "tape": "FEDVITALS_TAPE",
}


@dataclass(frozen=True, slots=True)
class FlowerEnvironment:
    """The settings that can be given without a line of code. None: the default."""

    store: str | None = None
    run: str | None = None
    probes: str | None = None
    privacy: int | None = None
    tracebacks: bool | None = None
    tape: str | None = None  # the folder of clients' tapes; the server's lies beside its store

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> FlowerEnvironment:
        """Return the settings of these environment variables; an empty variable counts as unset."""
        values = {name: environment.get(variable) or None for name, variable in VARIABLE_NAMES.items()}
        level, words = values["privacy"], values["tracebacks"]
        if level is not None and not level.isdecimal():
            raise ConfigError(f"{VARIABLE_NAMES['privacy']} is a level from 0 to 4, got '{level}'.")
        return cls(
            store=values["store"],
            run=values["run"],
            probes=values["probes"],
            privacy=None if level is None else int(level),
            tracebacks=None if words is None else words != "0",
            tape=values["tape"],
        )

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that make a process, and all that it starts, watched.

        `inherited`: the environment that they are added to; its values hold where these settings are None.
        """
        settings: dict[str, str | int | None] = {
            "store": self.store,
            "run": self.run,
            "probes": self.probes,
            "privacy": self.privacy,
            "tracebacks": None if self.tracebacks is None else int(self.tracebacks),
            "tape": None if self.tape is None else Path(self.tape).absolute().as_posix(),
        }
        path = inherited.get("PYTHONPATH", "")
        if path.split(os.pathsep)[0] != str(SITE_FOLDER):
            path = f"{SITE_FOLDER}{os.pathsep}{path}" if path else str(SITE_FOLDER)
        named = {VARIABLE_NAMES[name]: str(value) for name, value in settings.items() if value is not None}
        return {SWITCH_VARIABLE: "1", "PYTHONPATH": path, **named}


def absolute_store(store: str | None) -> str:
    """Return the store's target so that it works from any folder, because processes have folders of their own."""
    where = store_target(store)
    return where if isinstance(where, str) else str(where.absolute())
