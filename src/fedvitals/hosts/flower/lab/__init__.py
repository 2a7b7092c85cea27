# SPDX-License-Identifier: Apache-2.0
"""The lab on Flower nodes."""
