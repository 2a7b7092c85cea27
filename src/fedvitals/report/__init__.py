# SPDX-License-Identifier: Apache-2.0
"""A run's whole story in one file that needs nothing else: HTML, Markdown or PDF, out of the pages' own views."""
