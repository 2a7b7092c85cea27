# SPDX-License-Identifier: Apache-2.0
"""Sinks send records to other tools while a run trains: `fv.Monitor(sinks=[fv.sinks.Prometheus()])`.

Names are imported on first use. A sink whose package is missing raises `MissingExtraError` with the line that installs
it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedvitals.sinks.alerts.channels import Command as Command
    from fedvitals.sinks.alerts.channels import File as File
    from fedvitals.sinks.alerts.email import Email as Email
    from fedvitals.sinks.alerts.rules import rule as rule
    from fedvitals.sinks.alerts.sink import Alerts as Alerts
    from fedvitals.sinks.alerts.webhook import Webhook as Webhook
    from fedvitals.sinks.mlflow import MLflow as MLflow
    from fedvitals.sinks.otel.sink import OpenTelemetry as OpenTelemetry
    from fedvitals.sinks.prometheus.sink import Prometheus as Prometheus
    from fedvitals.sinks.tensorboard import TensorBoard as TensorBoard
    from fedvitals.sinks.wandb import WeightsAndBiases as WeightsAndBiases

_HOME = {
    "Alerts": "fedvitals.sinks.alerts.sink",
    "Command": "fedvitals.sinks.alerts.channels",
    "Email": "fedvitals.sinks.alerts.email",
    "File": "fedvitals.sinks.alerts.channels",
    "MLflow": "fedvitals.sinks.mlflow",
    "OpenTelemetry": "fedvitals.sinks.otel.sink",
    "Prometheus": "fedvitals.sinks.prometheus.sink",
    "TensorBoard": "fedvitals.sinks.tensorboard",
    "Webhook": "fedvitals.sinks.alerts.webhook",
    "WeightsAndBiases": "fedvitals.sinks.wandb",
    "rule": "fedvitals.sinks.alerts.rules",
}

__all__ = [*_HOME]  # noqa: PLE0604 - the names are strings


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedvitals.sinks' has no attribute '{name}'. It offers: {', '.join(_HOME)}.")
    globals()[name] = public = getattr(importlib.import_module(_HOME[name]), name)
    return public


def __dir__() -> list[str]:
    return sorted(__all__)
