# SPDX-License-Identifier: Apache-2.0
"""Flower federations for the studies."""
