# SPDX-License-Identifier: Apache-2.0
"""The errors that fedvitals raises. Each message says what happened, what was given, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BusyError",
    "ConfigError",
    "FedvitalsError",
    "MissingExtraError",
    "PluginError",
    "RecordError",
    "StoreError",
    "StoreLostError",
]


class FedvitalsError(Exception):
    """The base class of all errors that fedvitals raises on purpose."""


class ConfigError(FedvitalsError):
    """Raised for a setting, name or argument that is not valid; the message says what was received and what to do."""


class UnsuitedError(ConfigError):
    """A model, data or a loss that a probe cannot measure, though nothing is wrong: the probe abstains and says so."""


class RecordError(FedvitalsError):
    """Raised for a record whose shape, size or name is not acceptable; the record is not stored."""


class StoreError(FedvitalsError):
    """Raised when a store cannot be opened, read or written."""


class EmptyStoreError(StoreError):
    """A store that nothing has been written to yet."""


class BusyError(StoreError):
    """Raised when a store or run must not be changed because another process is writing it."""


class StoreLostError(StoreError):
    """Raised when another program has overwritten a store's file: `lost` records that it held are gone.

    Args:
        message: What happened.
        lost: How many records are gone.
    """

    def __init__(self, message: str, lost: int) -> None:
        super().__init__(message)
        self.lost = lost


class MissingExtraError(FedvitalsError, ImportError):
    """Raised when a feature is used whose package is not installed; the message has the line that installs it.

    Args:
        package: The package that is missing.
        extra: The extra of fedvitals that installs it.
        purpose: What needs it, for the message.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with:  pip install 'fedvitals[{extra}]'"
        )


class PluginError(FedvitalsError):
    """Raised when a command or a detector of another distribution cannot be loaded."""


def text_of(value: object) -> str:
    """Return a user's object as text, such as an exception; if its own code for that fails, say so."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - a broken __str__ in user code
        return f"<{type(value).__name__} whose text fails with {type(error).__name__}>"


def unknown(what: str, got: str, known: Iterable[str]) -> str:
    """Return the sentence that answers a wrong name: what was given, what exists, what was probably meant."""
    names = sorted(known)
    close = difflib.get_close_matches(got, names, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    quoted = (f"'{name}'" if "," in name or " " in name else name for name in names)  # or one name would look like two
    return f"Unknown {what} '{got}'. Known: {', '.join(quoted) or 'none'}.{hint}"
