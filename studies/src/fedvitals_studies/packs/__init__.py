# SPDX-License-Identifier: Apache-2.0
"""Folders that run a study on a machine without a network."""
