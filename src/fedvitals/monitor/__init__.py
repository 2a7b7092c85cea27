# SPDX-License-Identifier: Apache-2.0
"""The spine: scopes of run, round and client become records, which leave for the sinks."""
