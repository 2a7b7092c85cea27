# SPDX-License-Identifier: Apache-2.0
"""From records to findings: detectors run on a history, live or stored."""
