# SPDX-License-Identifier: Apache-2.0
"""Recorded Flower rounds, run again."""
