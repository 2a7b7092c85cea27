# SPDX-License-Identifier: Apache-2.0
"""Where records go besides the store."""
