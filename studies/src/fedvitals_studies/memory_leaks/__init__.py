# SPDX-License-Identifier: Apache-2.0
"""Study of memory forecasts: ten planted leaks, each until the process is killed for it, and healthy curves."""
