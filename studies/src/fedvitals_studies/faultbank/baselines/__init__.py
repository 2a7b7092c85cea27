# SPDX-License-Identifier: Apache-2.0
"""Other methods that the detectors are compared with."""
