# SPDX-License-Identifier: Apache-2.0
"""What a run amounts to, for people: the health card (later also plots and pages)."""
