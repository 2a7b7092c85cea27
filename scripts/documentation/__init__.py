# SPDX-License-Identifier: Apache-2.0
"""The documentation: pages that are generated from code, the reference, the site, and the checks of its links."""
