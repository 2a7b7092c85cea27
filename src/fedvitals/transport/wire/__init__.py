# SPDX-License-Identifier: Apache-2.0
"""The wire format: records as bytes, and back."""
