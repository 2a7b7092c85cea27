# SPDX-License-Identifier: Apache-2.0
"""Export by OpenTelemetry."""
