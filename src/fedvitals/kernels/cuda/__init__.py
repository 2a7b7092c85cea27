# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled by Triton, and work captured as CUDA graphs. Imported only where there is a GPU."""
