# SPDX-License-Identifier: Apache-2.0
"""Compares runs."""
