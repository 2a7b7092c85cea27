# SPDX-License-Identifier: Apache-2.0
"""What only the dashboard shows, as data."""
