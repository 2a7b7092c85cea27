# SPDX-License-Identifier: Apache-2.0
"""The models that clients train."""
