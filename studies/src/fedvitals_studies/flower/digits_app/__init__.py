# SPDX-License-Identifier: Apache-2.0
"""A small Flower app on scikit-learn's digits with faults on demand, to test fedvitals' Flower integration.

`flower.app_folder.write_app` copies it into a separate folder, where this package is called `patient`, with or without
the lines that a user writes for fedvitals; the version here does not refer to fedvitals.
"""
