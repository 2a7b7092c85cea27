# SPDX-License-Identifier: Apache-2.0
"""Serves the dashboard: an ASGI app over `views`, and a front end of plain ES modules in static/; needs no torch."""
