# SPDX-License-Identifier: Apache-2.0
"""The virtual clock: links, devices, journeys and waiting."""
