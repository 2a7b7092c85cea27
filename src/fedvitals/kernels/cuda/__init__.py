# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs, compiled by Triton. Imported only where there is a GPU."""
