# SPDX-License-Identifier: Apache-2.0
"""Detection outside the lab: plain loops as the README shows them, on other data and models, with faults of its own."""
