# SPDX-License-Identifier: Apache-2.0
"""Hosts: how fedvitals attaches to the training code that people already have."""
