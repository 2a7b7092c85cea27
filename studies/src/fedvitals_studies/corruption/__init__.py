# SPDX-License-Identifier: Apache-2.0
"""Damages stores, tapes and spill files at random, and compares what readers and the doctor report with the truth."""
