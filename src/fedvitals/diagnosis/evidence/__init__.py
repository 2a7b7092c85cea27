# SPDX-License-Identifier: Apache-2.0
"""Evidence against single clients, computed from the numbers of a run."""
