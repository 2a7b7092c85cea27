# SPDX-License-Identifier: Apache-2.0
"""Reports on a run as one self-contained file: HTML, Markdown or PDF, from the same views as the dashboard."""
