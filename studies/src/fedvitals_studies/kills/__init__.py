# SPDX-License-Identifier: Apache-2.0
"""Kills processes at random moments and checks that no acknowledged record is lost."""
