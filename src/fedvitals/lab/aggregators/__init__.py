# SPDX-License-Identifier: Apache-2.0
"""From client states to the next server state."""
