# SPDX-License-Identifier: Apache-2.0
"""Kernels for CPUs, compiled by LLVM."""
