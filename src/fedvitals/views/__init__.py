# SPDX-License-Identifier: Apache-2.0
"""What people are shown of a run, as data: terminal, dashboard, plots and report draw the same answers."""
