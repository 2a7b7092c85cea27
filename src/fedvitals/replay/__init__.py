# SPDX-License-Identifier: Apache-2.0
"""Replay: a tape of a run, and all that can be done with it: run it again, prove it, step through it, ask «what if»."""
