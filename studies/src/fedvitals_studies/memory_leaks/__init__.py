# SPDX-License-Identifier: Apache-2.0
"""Study of memory forecasts: ten planted leaks, each until its process is killed, and healthy federations."""
