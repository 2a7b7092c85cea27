# SPDX-License-Identifier: Apache-2.0
"""The table of all issues that detectors can report."""
