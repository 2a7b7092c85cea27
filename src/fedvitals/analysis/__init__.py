# SPDX-License-Identifier: Apache-2.0
"""Answers computed from recorded spans and transfers: bottlenecks, stragglers, traffic, remedies."""
