# SPDX-License-Identifier: Apache-2.0
"""What Flower servers and clients record for replay."""
