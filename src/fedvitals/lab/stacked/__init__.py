# SPDX-License-Identifier: Apache-2.0
"""Clients trained as one batch."""
