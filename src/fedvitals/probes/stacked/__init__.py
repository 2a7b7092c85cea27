# SPDX-License-Identifier: Apache-2.0
"""Probes of clients that train as one batch."""
