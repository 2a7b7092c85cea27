# SPDX-License-Identifier: Apache-2.0
"""Read-only tools over a store for AI agents, served by the Model Context Protocol."""
