# SPDX-License-Identifier: Apache-2.0
"""A small Flower app on scikit-learn's digits that falls ill on demand: what fedvitals' Flower part is tried on.

`flower.app_folder.write_app` copies it into a folder of its own, where this package is called `patient`, with or
without the lines that a user writes for fedvitals; as it stands here it knows nothing of fedvitals.
"""
