# SPDX-License-Identifier: Apache-2.0
"""Topologies: who trains with whom, and who averages."""
