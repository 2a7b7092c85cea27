# SPDX-License-Identifier: Apache-2.0
"""ByzFL, an independent implementation. Its package imports torchvision and seaborn on the way to its benchmark, which
aggregators and attacks do not need: only the parts that they do need are loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def byzfl_modules(*names: str) -> Iterator[list[types.ModuleType]]:
    """Import some of ByzFL's modules inside the block, or skip the test where ByzFL is not installed."""
    found = importlib.util.find_spec("byzfl")
    pytest.importorskip("scipy.spatial")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("ByzFL is not installed")
    package = types.ModuleType("byzfl")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["byzfl"] = package
    yield [importlib.import_module(f"byzfl.{name}") for name in names]
    for module in [loaded for loaded in sys.modules if loaded.split(".")[0] == "byzfl"]:
        del sys.modules[module]
