# SPDX-License-Identifier: Apache-2.0
"""The web page: a FastAPI app over `views`, and a front end of plain ES modules in static/. Loads without torch."""
