# SPDX-License-Identifier: Apache-2.0
"""Checking, repairing, compacting and thinning of stores."""
