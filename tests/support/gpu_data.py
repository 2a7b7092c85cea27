# SPDX-License-Identifier: Apache-2.0
"""Images for tests on a GPU machine, where scikit-learn's are not to be had: each class a pattern, with noise."""

import torch

from fedvitals import lab


def images(samples=600, shape=(3, 12, 12), classes=5, seed=0):
    stream = torch.Generator().manual_seed(seed)
    patterns = torch.rand(classes, *shape, generator=stream)
    y = torch.randint(classes, (samples,), generator=stream)
    x = (patterns[y] + 0.3 * torch.randn(samples, *shape, generator=stream)).clamp(0, 1)
    return lab.Arrays(x, y)
