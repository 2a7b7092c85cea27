# SPDX-License-Identifier: Apache-2.0
"""The core of the monitor: turns what happens in runs, rounds and clients into records, and sends them to the sinks."""
