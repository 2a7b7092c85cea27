# SPDX-License-Identifier: Apache-2.0
"""Whether the answers of `fedvitals mcp`'s tools suffice to name the culprit and the cause of a faulty run."""
