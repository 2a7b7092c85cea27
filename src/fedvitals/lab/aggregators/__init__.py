# SPDX-License-Identifier: Apache-2.0
"""Aggregation rules: from the clients' states to the next server state."""
