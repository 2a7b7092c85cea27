# SPDX-License-Identifier: Apache-2.0
"""The debugger for recorded and running federations."""
