# SPDX-License-Identifier: Apache-2.0
"""Run recorded rounds again, and compare them with the recording."""
