# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch loops."""
