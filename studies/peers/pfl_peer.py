# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: INP001 - a script
"""pfl's SimulatedBackend with PyTorch, one process, federated averaging, no evaluation in the rounds that are timed."""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from work import Clock, Work, answer, arguments, commands

FOREVER = 1_000_000


class Trained(nn.Module):
    """The module as pfl wants it: it knows its loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.losses: list[Tensor] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        found = F.cross_entropy(self.module(x), y)
        self.losses.append(found.detach())
        return found

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, object]:  # noqa: ARG002 - part of pfl's protocol
        return {}


class Conversation(TrainingProcessCallback):
    """Answers for each round, and waits for the next to be asked for."""

    def __init__(self, work: Work, model: Trained) -> None:
        self.work, self.model, self.number = work, model, 0
        self._commands: Iterator[str] = commands()
        self._clock = Clock()

    def on_train_begin(self, *, model: object) -> Metrics:  # noqa: ARG002
        answer(ready=True)
        self.wait()
        return Metrics()

    def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
        steps = self.work.orders.shape[2]
        last = self.model.losses[steps - 1 :: steps]
        self._clock.tell(self.work.steps, [float(loss) for loss in last])
        self.model.losses.clear()
        self.number += 1
        return not self.wait(), Metrics()

    def wait(self) -> bool:
        """Whether there is another round to do."""
        for command in self._commands:
            if command == "test":
                answer(accuracy=self.work.accuracy(self.model.module))
            else:
                self._clock = Clock()
                return True
        return False


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    work = Work(given.folder)
    module = Trained(work.model())
    talk = Conversation(work, module)

    def dataset(client: int) -> PyTorchTensorDataset:
        """In the order in which everybody trains, so that pfl's own slices are the mini-batches."""
        (x, y), order = work.client(client), work.order(talk.number, client).flatten()
        return PyTorchTensorDataset((x[order], y[order]), user_id=str(client))

    steps, batch = work.orders.shape[2:]
    optimizer = {"sgd": torch.optim.SGD, "adam": functools.partial(torch.optim.Adam, eps=work.settings["epsilon"])}
    model = PyTorchModel(module, optimizer[work.settings["optimizer"]], torch.optim.SGD(module.parameters(), lr=1.0))
    users = FederatedDataset(dataset, get_user_sampler("minimize_reuse", [*range(work.clients)]))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=FOREVER,
            evaluation_frequency=FOREVER,
            train_cohort_size=work.clients,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users, postprocessors=[WeightByUser()]),
        model,
        NNTrainHyperParams(
            local_num_epochs=None,
            local_num_steps=steps,
            local_learning_rate=work.settings["learning_rate"],
            local_batch_size=batch,
        ),
        callbacks=[talk],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
