# SPDX-License-Identifier: Apache-2.0
"""Engines: they train and evaluate the clients of a round."""
