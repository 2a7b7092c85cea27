# SPDX-License-Identifier: Apache-2.0
"""A published study, rerun."""
