# SPDX-License-Identifier: Apache-2.0
"""A plug-in for fedvitals: one detector and one verb."""
