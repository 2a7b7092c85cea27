# SPDX-License-Identifier: Apache-2.0
"""Hosts: how fedvitals attaches to existing training code."""
