# SPDX-License-Identifier: Apache-2.0
"""Faults planted in NVFlare's simulator, and what is found of them."""
