# SPDX-License-Identifier: Apache-2.0
"""Plug-ins: verbs and detectors that other distributions provide as entry points. Listing them imports none of them.

    [project.entry-points."fedvitals.verbs"]
    hello = "acme.verb:command"          # a click command

    [project.entry-points."fedvitals.detectors"]
    acme = "acme.detector:detect"        # a function of (history, round_index), or a sequence of such functions

See examples/plugin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from fedvitals.errors import PluginError

if TYPE_CHECKING:  # imports numpy, which `fedvitals --help` avoids
    from fedvitals.protocols import Detector

VERBS, DETECTORS = "fedvitals.verbs", "fedvitals.detectors"  # the entry-point groups


def installed(group: str) -> list[EntryPoint]:
    """Return the entry points of a group, sorted by name and distribution."""
    return sorted(entry_points(group=group), key=lambda point: (point.name, distribution_of(point)))


def distribution_of(point: EntryPoint) -> str:
    """Return the name of the distribution that provides an entry point, as `pip` spells it."""
    return point.dist.name if point.dist is not None else "an unknown distribution"


def load(point: EntryPoint, kind: str, accepts: Callable[[Any], bool], expected: str) -> Any:
    """Import what an entry point names and return it.

    Raises PluginError, which names the plug-in and its distribution, if that fails or `accepts` returns False. `kind`
    and `expected` are words for its message: «verb», «a click command».
    """
    who = f"The {kind} '{point.name}' of {distribution_of(point)}"
    try:
        plugin = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(f"{who} cannot be loaded ({type(error).__name__}: {error}).") from error
    if not accepts(plugin):
        raise PluginError(f"{who} ({point.value}) is not {expected}.")
    return plugin


def load_detectors(point: EntryPoint) -> tuple[Detector, ...]:
    """Import and return the detector, or the detectors, that an entry point names."""
    expected = "a function of (history, round_index), or a sequence of such functions"
    plugin = load(point, "detector", lambda plugin: all(map(_is_detector, _listed(plugin))), expected)
    return tuple(_listed(plugin))


def _listed(plugin: Any) -> Sequence[Any]:
    return plugin if isinstance(plugin, list | tuple) else (plugin,)


def _is_detector(plugin: Any) -> bool:
    """Return whether it can be called with a history and a round."""
    try:
        inspect.signature(plugin).bind(None, 0)
    except TypeError:  # not callable, or with other parameters
        return False
    except ValueError:  # compiled, without a signature: only a call will tell
        return callable(plugin)
    return True
