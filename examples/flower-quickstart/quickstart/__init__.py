# SPDX-License-Identifier: Apache-2.0
"""A Flower app on scikit-learn's digits, watched by fedvitals."""
