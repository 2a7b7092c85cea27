# SPDX-License-Identifier: Apache-2.0
"""Probes: functions from a `View` of one moment of training to numbers, each tested against a slow reference."""
