# SPDX-License-Identifier: Apache-2.0
"""A debugger for recorded and running federations."""
