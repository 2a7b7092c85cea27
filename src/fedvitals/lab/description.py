# SPDX-License-Identifier: Apache-2.0
"""Base classes of an experiment's description: frozen, comparable, typed, and equivalent in TOML.

A class `LabelNoise(Description)` is written `kind = "label_noise"` in TOML. Values are checked when the description is
created (`__post_init__`), types when an experiment is assembled (`experiment.py`).
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from fedvitals.errors import ConfigError


def kind_of(class_name: str) -> str:
    """Return a class name's form in TOML: `TrimmedMean` → `trimmed_mean`, `IID` → `iid`, `FedAvgM` → `fedavgm`."""
    if class_name.upper() == class_name or class_name.startswith("Fed"):
        return class_name.lower()
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name).lower()


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of a part of which there is only one kind."""

    # Fields added later: not written while they have their default, so that digests of older experiments stay.
    later: ClassVar[tuple[str, ...]] = ()


class Description(msgspec.Struct, frozen=True, tag_field="kind", tag=kind_of, forbid_unknown_fields=True):
    """Base class of a part of which there are several kinds, identified by `kind`."""

    later: ClassVar[tuple[str, ...]] = ()  # as of a `Part`


def require(fact: bool, what: str, got: object, allowed: str) -> None:
    """Raise ConfigError unless `fact`, as in `require(0 < rate <= 1, "rate of label_noise", rate, "above 0, up to
    1")`.
    """
    if not fact:
        raise ConfigError(f"The {what} cannot be {got!r}: it must be {allowed}.")
