# SPDX-License-Identifier: Apache-2.0
"""A long training with the dashboard open: does either process use more and more of the machine?"""
