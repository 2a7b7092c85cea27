# SPDX-License-Identifier: Apache-2.0
"""How much the numbers speak against a client."""
