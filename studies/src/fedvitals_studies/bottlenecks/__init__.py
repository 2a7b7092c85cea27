# SPDX-License-Identifier: Apache-2.0
"""Planted bottlenecks, and whether the profile names them."""
