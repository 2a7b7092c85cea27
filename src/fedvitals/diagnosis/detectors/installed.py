# SPDX-License-Identifier: Apache-2.0
"""Detectors of other distributions, from the entry-point group `fedvitals.detectors`. They run only when named.

A plug-in that cannot be loaded does not stop the training: it is replaced by a detector that fails in every round, so
that the failure is recorded as an event and the run gets no all-clear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedvitals import plugins
from fedvitals.errors import ConfigError, PluginError, unknown
from fedvitals.protocols import Detector, History
from fedvitals.records import Finding


class PluginDetector:
    """A detector of another distribution, named after its entry point.

    `detect` is None if it failed to load with `error`.
    """

    def __init__(self, name: str, detect: Detector | None, error: PluginError | None = None) -> None:
        self.__name__ = name
        self._detect, self._error = detect, error

    def __call__(self, history: History, round_index: int) -> Iterator[Finding]:
        if self._detect is None:
            raise PluginError(str(self._error))
        for finding in self._detect(history, round_index):
            if not isinstance(finding, Finding):
                raise PluginError(f"It gave {finding!r}, which is not a Finding.")
            yield finding


def detectors_named(name: str, shipped: Sequence[str]) -> tuple[Detector, ...]:
    """Import the detectors that an installed distribution provides under a name, and return them.

    `shipped`: our own names, for the ConfigError that lists all known names if this one is unknown.
    """
    points = {point.name: point for point in reversed(plugins.installed(plugins.DETECTORS))}
    if name not in points:
        raise ConfigError(unknown("set of detectors", name, [*shipped, *points]))
    try:
        detectors = plugins.load_detectors(points[name])
    except PluginError as error:
        return (PluginDetector(name, None, error),)
    if len(detectors) == 1:
        return (PluginDetector(name, detectors[0]),)
    return tuple(
        PluginDetector(f"{name}.{getattr(detect, '__name__', type(detect).__name__)}", detect) for detect in detectors
    )
