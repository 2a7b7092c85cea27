# SPDX-License-Identifier: Apache-2.0
"""Who averages with whom."""
