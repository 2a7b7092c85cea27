# SPDX-License-Identifier: Apache-2.0
"""From one moment of training to numbers: plain functions of a `View`, each tested against a slow, obvious twin."""
