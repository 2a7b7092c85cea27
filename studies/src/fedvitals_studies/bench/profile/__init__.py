# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of profiling and of the exporters."""
