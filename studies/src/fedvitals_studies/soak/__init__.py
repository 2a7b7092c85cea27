# SPDX-License-Identifier: Apache-2.0
"""A long training with the dashboard open: does either process take more and more of the machine?"""
