# SPDX-License-Identifier: Apache-2.0
"""Everything that is read from a store."""
