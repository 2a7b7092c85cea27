# SPDX-License-Identifier: Apache-2.0
"""Measures the detectors on runs whose faults are known."""
