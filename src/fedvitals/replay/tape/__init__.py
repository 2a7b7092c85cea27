# SPDX-License-Identifier: Apache-2.0
"""The tape: the recording of a run from which its rounds can be run again."""
