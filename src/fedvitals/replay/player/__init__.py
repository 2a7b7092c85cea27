# SPDX-License-Identifier: Apache-2.0
"""Recorded rounds, run again."""
