# SPDX-License-Identifier: Apache-2.0
"""What a site measures and releases: what the job requests, but never more than the site's own environment allows.

The variables FEDVITALS_PRIVACY and FEDVITALS_TRACEBACKS of a site's machine are set by its administrator: the lower of
the two levels applies. Training scripts in processes of their own get the result through their environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedvitals.errors import ConfigError
from fedvitals.hosts.startup_path import with_site_folder
from fedvitals.transport.privacy import PrivacyPolicy, policy_for

PRIVACY, TRACEBACKS, PROBES = "FEDVITALS_PRIVACY", "FEDVITALS_TRACEBACKS", "FEDVITALS_PROBES"
TRAINER_SWITCH, FAILURE_FILE = "FEDVITALS_NVFLARE_TRAINER", "FEDVITALS_NVFLARE_FAILURE"
DEFAULT_LEVEL = 2


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """What is measured at a site (`probes`), and what may leave it."""

    probes: str = "standard"
    level: int = DEFAULT_LEVEL
    tracebacks: bool = False

    @classmethod
    def of_job(
        cls, environment: Mapping[str, str], probes: str, privacy: int | None, *, tracebacks: bool
    ) -> SiteSettings:
        """Return what a job requests, within what the site's environment allows."""
        asked = policy_for("nvflare", privacy, tracebacks=tracebacks)
        allowed = environment.get(PRIVACY, "")
        if allowed and (not allowed.isdecimal() or int(allowed) > 4):
            raise ConfigError(
                f"{PRIVACY} is a level from 0 to 4, got '{allowed}'. Nothing leaves this site until it is."
            )
        level = min(asked.level, int(allowed)) if allowed else asked.level
        return cls(probes, level, asked.tracebacks and environment.get(TRACEBACKS) != "0")

    @classmethod
    def of_trainer(cls, environment: Mapping[str, str]) -> SiteSettings:
        """Return the settings that the site's component wrote into a training script's environment."""
        level = environment.get(PRIVACY, "0")
        return cls(
            environment.get(PROBES) or "standard",
            int(level) if level.isdecimal() else 0,
            environment.get(TRACEBACKS) == "1",
        )

    def variables(self, inherited: Mapping[str, str], failure_file: str) -> dict[str, str]:
        """Return the variables for training scripts that a site starts.

        `failure_file`: where they report why they failed.
        """
        return {
            TRAINER_SWITCH: "1",
            PROBES: self.probes,
            PRIVACY: str(self.level),
            TRACEBACKS: str(int(self.tracebacks)),
            FAILURE_FILE: failure_file,
            "PYTHONPATH": with_site_folder(inherited),
        }

    def limited_to(self, level: int) -> SiteSettings:
        """Return the settings with at most this level, and without any text of the site's own."""
        return SiteSettings(self.probes, min(self.level, level), tracebacks=False)

    @property
    def policy(self) -> PrivacyPolicy:
        """The privacy policy for this site's records."""
        return PrivacyPolicy(self.level, tracebacks=self.tracebacks)
