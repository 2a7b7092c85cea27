# SPDX-License-Identifier: Apache-2.0
"""Reads stores: one module for each kind of record."""
