# SPDX-License-Identifier: Apache-2.0
"""The verbs that the studies add to the command line."""
