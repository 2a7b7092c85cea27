# SPDX-License-Identifier: Apache-2.0
"""Tests the model of a what-if on the experiment's own test samples, and compares it with the run's model.

Possible if the tape contains the experiment and this machine has its data in the usual places: a tape of others must
not choose which files are read. The error comes from the number of samples: the standard deviation of a sample's score
over its square root; for the difference, the samples are the same for both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedvitals.dashboard.pages.tape_index import Opened
from fedvitals.errors import FedvitalsError
from fedvitals.store.read.reader import Reader
from fedvitals.views.memo import remembered

if TYPE_CHECKING:
    from torch import Tensor

    from fedvitals.lab.experiment import Experiment

MOST = 4e9  # the most weights times samples that a page computes: about a second


@dataclass(frozen=True, slots=True)
class PredictedScore:
    """A score of the hypothetical model and of the recorded one; errors are standard errors."""

    name: str  # «accuracy», or the score that belongs to the experiment's loss
    unit: str
    recorded: float
    changed: float
    error: float  # of the changed model
    difference: float
    difference_error: float
    samples: int


def predicted_score(
    reader: Reader, run: str, index: Opened, recorded: Tensor, changed: Tensor
) -> PredictedScore | None:
    """Test both models; None if there is no experiment, no data, or too much to compute for a page."""
    text = index.tape.setting.description.get("experiment")
    if not isinstance(text, str):
        return None
    try:
        engine = remembered(reader, "test engine", "one run", (run, index.sign), lambda: _engine(text))
        if engine is None or len(recorded) != engine.site.layout.size:
            return None
        before, after = (engine.evaluate(model)[1].double() for model in (recorded, changed))
    except (FedvitalsError, OSError, ModuleNotFoundError, RuntimeError, ValueError):
        return None  # the data are not here, or the model differs from the experiment's
    name = engine.site.loss.score_name
    unit = "share" if name == "accuracy" else ""
    means, error = [float(scores.mean()) for scores in (before, after)], _standard_error(after)
    apart = _standard_error(after - before)
    return PredictedScore(name, unit, means[0], means[1], error, means[1] - means[0], apart, len(after))


def _standard_error(scores: Tensor) -> float:
    return float(scores.std()) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan


def _engine(text: str) -> Any:
    """Return an engine over the experiment's data; None if testing would keep the user waiting, or read other files."""
    from fedvitals.lab import read  # noqa: PLC0415 - needs torch
    from fedvitals.lab.engines.engine import Engine  # noqa: PLC0415
    from fedvitals.lab.run import prepare_site  # noqa: PLC0415

    experiment = read(text)
    if _chooses_files(experiment) or getattr(experiment.model, "pretraining", None) is not None:
        return None
    site = prepare_site(experiment)
    samples = len(site.dataset.test_y)
    if site.home is not None or samples < 2 or samples * site.layout.size > MOST:
        return None
    return Engine(site, "auto", 1)


def _chooses_files(experiment: Experiment) -> bool:
    """Return whether the experiment names files of its own: a page must not read what somebody's tape names."""
    from fedvitals.lab.data.text import Text  # noqa: PLC0415 - needs torch

    data = experiment.dataset
    return isinstance(data, Text) and (data.folder, data.pattern) != (None, Text().pattern)
