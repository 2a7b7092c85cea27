# SPDX-License-Identifier: Apache-2.0
"""The recording of a run."""
