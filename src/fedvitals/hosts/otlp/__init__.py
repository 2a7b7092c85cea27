# SPDX-License-Identifier: Apache-2.0
"""Telemetry that arrives by OTLP."""
