# SPDX-License-Identifier: Apache-2.0
"""What if: changed runs and bisection."""
