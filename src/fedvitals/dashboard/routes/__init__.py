# SPDX-License-Identifier: Apache-2.0
"""The HTTP routes, one module for each group of pages."""
