# SPDX-License-Identifier: Apache-2.0
"""Run recorded Flower rounds again."""
