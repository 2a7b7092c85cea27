# SPDX-License-Identifier: Apache-2.0
"""Faults that the lab can plant."""
