# SPDX-License-Identifier: Apache-2.0
"""A job in which rounds without and with fedvitals alternate, and each process records its processor seconds.

NVFlare copies this file into the job, so it imports nothing else of the studies. Rounds with an odd number are
monitored. A monitored round ends when all its records are written, so that none of its cost falls into the next one.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.model import ModelLearnable, make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from torch import nn
from torch.nn import functional

import fedvitals as fv
from fedvitals.hosts.nvflare.server_component import ServerWatch
from fedvitals.hosts.nvflare.site.component import SiteWatch

WIDTHS = (64, 960, 960, 10)  # 994,570 parameters


def make_model() -> nn.Module:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    first, second, third, classes = WIDTHS
    return nn.Sequential(
        nn.Linear(first, second), nn.ReLU(), nn.Linear(second, third), nn.ReLU(), nn.Linear(third, classes)
    )


def is_watched(round_index: int) -> bool:
    """Whether fedvitals monitors a round."""
    return round_index % 2 == 1


class CostDiary:
    """Records when each round begins, in processor seconds of the process."""

    def __init__(self, folder: str, who: str) -> None:
        self._file = Path(folder) / f"{who}.jsonl"

    def begin(self, round_index: int) -> None:
        """Record the beginning of a round, which is the end of the previous one."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"round": round_index, "cpu": time.process_time()}) + "\n")


class AlternatingServerWatch(ServerWatch):
    """The server's component, which is inactive in every other round."""

    def __init__(self, folder: str, store: str) -> None:
        super().__init__(store, "cost")
        self.folder = folder
        self._watched = True

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Handle an event, unless its round is not monitored."""
        if event_type == AppEventType.ROUND_STARTED:
            round_index = fl_ctx.get_prop(AppConstants.CURRENT_ROUND)
            CostDiary(self.folder, "server").begin(round_index)
            self._watched = is_watched(round_index)
        if self._watched or event_type in (EventType.START_RUN, EventType.END_RUN):
            super().handle_event(event_type, fl_ctx)
        if self._watched and event_type == AppEventType.ROUND_DONE and self._rounds is not None:
            self._rounds.monitor.flush()


class AlternatingSiteWatch(SiteWatch):
    """A site's component, which is inactive in every other round."""

    def __init__(self, folder: str) -> None:
        super().__init__(trainers=False)
        self.folder = folder
        self._watched = True

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Handle an event, unless its round is not monitored."""
        if event_type == EventType.BEFORE_TASK_EXECUTION:
            round_index = fl_ctx.get_prop(FLContextKey.TASK_DATA).get_header(AppConstants.CURRENT_ROUND)
            CostDiary(self.folder, fl_ctx.get_identity_name()).begin(round_index)
            self._watched = is_watched(round_index)
        if self._watched or event_type in (EventType.ABOUT_TO_START_RUN, EventType.END_RUN):
            super().handle_event(event_type, fl_ctx)


class TrainingSite(Executor):  # type: ignore[misc] # NVFlare has no types
    """Trains the model on random samples; `measures_steps`: with `fv.watch` in monitored rounds."""

    def __init__(self, steps: int, batch: int, measures_steps: bool = False) -> None:
        super().__init__()
        self.steps, self.batch, self.measures_steps = steps, batch, measures_steps

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the weights after training."""
        del task_name, fl_ctx, abort_signal
        torch.set_num_threads(1)
        round_index, model = shareable.get_header(AppConstants.CURRENT_ROUND), make_model()
        model.load_state_dict({k: torch.as_tensor(v) for k, v in from_shareable(shareable).data.items()})
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        x, y = torch.randn(self.steps * self.batch, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (self.steps * self.batch,))
        watching: Any = fv.watch(model, optimizer) if self.measures_steps and is_watched(round_index) else nullcontext()
        with watching:
            for inputs, labels in zip(x.split(self.batch), y.split(self.batch), strict=True):
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        weights = {name: values.numpy() for name, values in model.state_dict().items()}
        return DXO(DataKind.WEIGHTS, weights, {MetaKey.NUM_STEPS_CURRENT_ROUND: self.steps}).to_shareable()


class FirstModel(ModelPersistor):  # type: ignore[misc]
    """Provides the server's first model; saves nothing."""

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        """Return the first model."""
        del fl_ctx
        return make_model_learnable({name: values.numpy() for name, values in make_model().state_dict().items()}, {})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        """Save nothing."""
