# SPDX-License-Identifier: Apache-2.0
"""What runs at an NVFlare site: its component, and what watches its training scripts."""
