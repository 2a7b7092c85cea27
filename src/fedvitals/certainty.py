# SPDX-License-Identifier: Apache-2.0
"""The format of a probability on all front ends; imports nothing, so that `fedvitals --help` stays fast."""

import math


def certainty(probability: float, *, proven: bool = False) -> str:
    """Return a probability as whole per cent, the format of all pages, tables and sentences.

    A value that rounds to 100 % is shown as «> 99 %», since no statistic exceeds that, unless it is 1 and `proven` by
    an exact test or by a user's own rule.
    """
    if not math.isfinite(probability):
        return "–"
    if probability >= 0.995 and not (proven and probability == 1):
        return "> 99 %"
    return f"{100 * probability:.0f} %"
