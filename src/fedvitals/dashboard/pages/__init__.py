# SPDX-License-Identifier: Apache-2.0
"""Computes what only the dashboard shows, as data."""
