# SPDX-License-Identifier: Apache-2.0
"""Corrections: which exist, when they are tried, whether they helped."""
