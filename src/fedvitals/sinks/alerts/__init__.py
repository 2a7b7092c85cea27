# SPDX-License-Identifier: Apache-2.0
"""Alert rules, channels and delivery."""
