# SPDX-License-Identifier: Apache-2.0
"""Detectors that a user brings to the bank, to be judged beside ours: a plug-in by its name, or module:function."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from fedvitals import plugins
from fedvitals.diagnosis.examine import choose_detectors
from fedvitals.errors import ConfigError
from fedvitals.protocols import Detector


def load_detectors(name: str) -> tuple[Detector, ...]:
    """Return the detectors that a user named.

    Args:
        name: An installed plug-in (`acme`), or `module:function`, where the module may lie in the current folder.

    Raises:
        ConfigError: There is no such plug-in, module or function.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon:
        return choose_detectors([name])
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        detector = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"There is no detector {name}: {error}.") from error
    return choose_detectors(detector if isinstance(detector, list | tuple) else [detector])


def sources_of(names: Iterable[str]) -> bytes:
    """Return the source text of the named detectors' modules: when it changes, runs are examined again.

    Args:
        names: As `load_detectors` takes them.
    """
    text = b""
    for name in names:
        load_detectors(name)  # an unknown name is an error now, not after hours of training
        spec = importlib.util.find_spec(_module_of(name))
        text += name.encode() + (Path(spec.origin).read_bytes() if spec is not None and spec.origin else b"")
    return text


def _module_of(name: str) -> str:
    module_name, colon, _ = name.partition(":")
    points = {} if colon else {point.name: point for point in plugins.installed(plugins.DETECTORS)}
    return points[name].module if name in points else module_name
