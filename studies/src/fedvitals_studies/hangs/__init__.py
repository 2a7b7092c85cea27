# SPDX-License-Identifier: Apache-2.0
"""Study of rounds that stand still: planted hangs of five kinds in four hosts, and healthy rounds of uneven length."""
