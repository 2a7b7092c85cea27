# SPDX-License-Identifier: Apache-2.0
"""Run the lab on Flower's nodes."""
