# SPDX-License-Identifier: Apache-2.0
"""The table of everything that can be wrong."""
