# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: recognised by structure, measured at the server by Gram matrices."""
