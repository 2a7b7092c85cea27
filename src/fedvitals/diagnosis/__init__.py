# SPDX-License-Identifier: Apache-2.0
"""Detectors that turn a run's records into findings, live or on a stored run."""
