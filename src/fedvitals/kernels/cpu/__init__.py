# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled by LLVM."""
