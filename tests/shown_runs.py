# SPDX-License-Identifier: Apache-2.0
"""Stores for tests of what people are shown: small ones by hand, large ones by `trials.synthetic`."""
