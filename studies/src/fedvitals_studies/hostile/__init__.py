# SPDX-License-Identifier: Apache-2.0
"""Hostile telemetry, and federations in which one client sends it."""
