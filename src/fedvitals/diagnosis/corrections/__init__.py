# SPDX-License-Identifier: Apache-2.0
"""Corrections: which ones exist, when they are tried, and whether they helped."""
