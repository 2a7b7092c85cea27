# SPDX-License-Identifier: Apache-2.0
"""Who does the work of a round."""
