# SPDX-License-Identifier: Apache-2.0
"""What-if questions about recorded runs: changed re-aggregation, forks, and bisection."""
