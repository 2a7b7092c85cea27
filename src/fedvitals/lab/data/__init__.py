# SPDX-License-Identifier: Apache-2.0
"""Data sets and how they are partitioned among clients."""
