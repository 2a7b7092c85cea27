# SPDX-License-Identifier: Apache-2.0
"""The names of fedvitals in OpenTelemetry: attributes, units, severities. One table, for both directions.

Names follow the semantic conventions: `service.*` and `error.type` as defined there, and all our own in the namespace
the namespace `fedvitals.*`. The table is in docs/opentelemetry.md.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

from fedvitals.catalog import CATALOG
from fedvitals.errors import MissingExtraError
from fedvitals.records import Where

SERVICE = "fedvitals"
RUN, RUN_NAME, HOST, TOPOLOGY = "fedvitals.run.id", "fedvitals.run.name", "fedvitals.run.host", "fedvitals.run.topology"
ROUND, NODE, STEP = "fedvitals.round", "fedvitals.node", "fedvitals.step"
LAYER, GROUP = "fedvitals.layer", "fedvitals.group"
PLACES = {"round": ROUND, "node": NODE, "step": STEP, "layer": LAYER, "group": GROUP}  # field of Where → attribute
SOURCE, SEQUENCE = "fedvitals.source", "fedvitals.sequence"  # a record's identity: delivered twice, stored once
PART = "fedvitals.part"  # true on a span that is one part of its parent's time and has the part's name
OWN = "fedvitals.span."  # prefix of what our Spans hold in `attributes`
DATA = "fedvitals.data."  # prefix of what our Events hold in `data`
METRIC = "fedvitals."  # prefix of metric names
FINDING = "finding."  # prefix of the issue, in the event name of a finding

SEVERITIES = {"debug": 5, "info": 9, "warning": 13, "error": 17, "critical": 21}  # as OTLP numbers them
FINDING_LEVELS = {"note": "info", "warning": "warning", "critical": "error"}

_UNITS = {"seconds": "s", "s": "s", "bytes": "By", "1": "1", "share": "1", "0/1": "1", "class": "1", "%": "%"}


def level_of_severity(number: int) -> str:
    """Return «debug» … «critical» for OTLP's 1 to 24; a missing one counts as «info»."""
    levels = [level for level, least in SEVERITIES.items() if number >= least]
    return levels[-1] if levels else "info" if number <= 0 else "debug"


def unit_of(name: str) -> str:
    """Return a metric's unit in UCUM: s, By, 1, {sample}, {sample}/s; empty for a user's own metric."""
    measure = CATALOG.get(name)
    return "" if measure is None else "/".join(_unit(word) for word in _split(measure.unit))


def _split(unit: str) -> list[str]:
    return [unit] if unit in _UNITS else re.split(r"\s*/\s*|\s+per\s+", unit)


def _unit(word: str) -> str:
    # A counted thing is not a unit: by the conventions it is in braces, in the singular.
    return _UNITS.get(word) or "{" + re.sub(r"[^a-z_]+", "_", word.lower().removesuffix("s")) + "}"


def places(where: Where, *names: str) -> dict[str, Any]:
    """Return the coordinates as attributes, without those that are «the whole»; only the named ones, if any are."""
    places_by_field = {field: getattr(where, field) for field in names or PLACES}
    return {PLACES[field]: value for field, value in places_by_field.items() if value is not None}


@functools.cache
def message(module: str, name: str) -> Any:
    """Return a message class of OTLP, from the package that the OpenTelemetry project generates from its definition."""
    try:
        return getattr(importlib.import_module(f"opentelemetry.proto.{module}_pb2"), name)
    except ImportError as error:
        raise MissingExtraError("opentelemetry-proto", "otel", "OpenTelemetry") from error
