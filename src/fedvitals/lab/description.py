# SPDX-License-Identifier: Apache-2.0
"""What every part of an experiment's description is: frozen, comparable, typed, and the same in TOML.

A class `LabelNoise(Description)` is written `kind = "label_noise"` there. Values are checked where the description is
made, by `__post_init__`; types when an experiment is put together (`experiment.checked`).
"""

from __future__ import annotations

import re

import msgspec

from fedvitals.errors import ConfigError


def kind_of(class_name: str) -> str:
    """`TrimmedMean` → `trimmed_mean`, `IID` → `iid`, `FedAvgM` → `fedavgm`: a name of two words has an underscore."""
    if class_name.upper() == class_name or class_name.startswith("Fed"):
        return class_name.lower()
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name).lower()


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a part of which there is one kind."""


class Description(msgspec.Struct, frozen=True, tag_field="kind", tag=kind_of, forbid_unknown_fields=True):
    """Base of a part of which there are several kinds, told apart by `kind`."""


def require(fact: bool, what: str, got: object, allowed: str) -> None:
    """`require(0 < rate <= 1, "rate of label_noise", rate, "above 0, up to 1")`."""
    if not fact:
        raise ConfigError(f"The {what} cannot be {got!r}: it must be {allowed}.")
