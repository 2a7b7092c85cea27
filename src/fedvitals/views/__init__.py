# SPDX-License-Identifier: Apache-2.0
"""Computes what users are shown of a run, as data that terminal, dashboard, plots and report share."""
