# SPDX-License-Identifier: Apache-2.0
"""Differential privacy of whole clients: changes are clipped to a norm, and Gaussian noise is added.

`client_dp` does both on the client, so that not even the server sees more; `central_dp` does both at a trusted server,
which publishes nothing but the model (DP-FedAvg, McMahan et al. 2018). The noise multiplier is the standard deviation
divided by `clip`, which is how much one client can change what is protected: neighbouring federations differ in one
client whose change is 0. ε is computed by the Rényi accountant of Opacus; in `central_dp` as if every client were drawn
independently (Poisson sampling), which is the usual approximation of cohorts of a fixed size.

ε is of the updates: samples, losses and what else clients tell the monitor are not covered.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.lab import streams
from fedvitals.lab.aggregators.averages import FedAdam, FedAvg, FedAvgM, FedYogi
from fedvitals.lab.aggregators.drift import DriftCorrection
from fedvitals.lab.description import Description, kind_of, require
from fedvitals.lab.engines.tasks import Node, Update
from fedvitals.lab.topologies.asynchronous import Asynchronous
from fedvitals.lab.topologies.centralized import Centralized
from fedvitals.lab.topologies.clustered import Clustered

if TYPE_CHECKING:
    from fedvitals.lab.engines.site import Site
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.federation import Federation

MEANS = (FedAvg, FedAvgM, FedAdam, FedYogi)  # rules that need nothing but the mean of the updates
EPSILON = "privacy.epsilon"
NOTE = "privacy spent"  # in the server's notes: how often each client has sent
ORDERS = [*(1 + tenth / 10 for tenth in range(1, 100)), *range(12, 64), 128, 256, 512, 1024]  # of Rényi divergences


class DifferentialPrivacy(Description, frozen=True):
    """Base class of the kinds of privacy."""

    clip: float = 1.0  # largest L2 norm of a client's change
    noise: float = 1.0  # standard deviation of the noise in units of `clip`; 0 only clips, and has no ε
    delta: float = 1e-5  # of (ε, δ)

    def __post_init__(self) -> None:
        kind = kind_of(type(self).__name__)
        require(math.isfinite(self.clip) and self.clip > 0, f"clip of {kind}", self.clip, "finite and above 0")
        require(math.isfinite(self.noise) and self.noise >= 0, f"noise of {kind}", self.noise, "finite, 0 or more")
        require(0 < self.delta < 1, f"delta of {kind}", self.delta, "between 0 and 1")

    def check(self, experiment: Experiment) -> None:
        raise NotImplementedError

    def clipped(self, change: Tensor) -> Tensor:
        """Return a change scaled to a norm of at most `clip`. What is not finite stays so, for detectors to see."""
        scale: Tensor = (self.clip / torch.linalg.vector_norm(change)).clamp(max=1.0)
        return change * scale

    def draw(self, change: Tensor, stream: torch.Generator) -> Tensor:
        """Return noise for a change. It is drawn on the CPU, so that it is the same on every device."""
        return torch.randn(change.shape, generator=stream).mul_(self.noise * self.clip).to(change.device)


class ClientDP(DifferentialPrivacy, frozen=True):
    """Differential privacy on the client: it clips its update and adds noise before it sends it.

    ε of a client is that of all messages it has sent so far.

    Args:
        clip: The largest norm of a client's change.
        noise: The standard deviation of the noise, as a multiple of `clip`.
        delta: The δ for which ε is computed.
    """

    def check(self, experiment: Experiment) -> None:
        _require_topology(self, experiment, (Centralized, Asynchronous, Clustered), "clients hand models to each other")
        if isinstance(experiment.aggregator, DriftCorrection):
            kind = kind_of(type(experiment.aggregator).__name__)
            raise ConfigError(
                f"The aggregator {kind} learns more of a client than its update, a vector of its whole training, which "
                "client_dp would leave without noise. Take fedavg, or fednova."
            )

    def protect(self, update: Update, weights: int, stream: torch.Generator) -> None:
        """Replace the state that a client is about to send."""
        start = update.start[:weights]
        change = self.clipped(update.state[:weights] - start)
        update.state = torch.cat([start + change + self.draw(change, stream), update.state[weights:]])


class CentralDP(DifferentialPrivacy, frozen=True):
    """Differential privacy at the server, which clips updates and adds noise to their mean.

    All clients have the same weight, because the noise would not hide one with many samples.

    Args:
        clip: The largest norm of a client's change.
        noise: The standard deviation of the noise, as a multiple of `clip`.
        delta: The δ for which ε is computed.
    """

    def check(self, experiment: Experiment) -> None:
        _require_topology(self, experiment, (Centralized, Asynchronous), "not only the server's one mean is published")
        require_mean("privacy = «central_dp»", experiment)

    def protect(
        self, updates: Iterable[Update], before: Tensor, weights: int, stream: torch.Generator
    ) -> Iterator[Update]:
        """Yield the updates clipped and with a weight of 1 each. The first one carries the noise of their sum, so that
        of n clients' mean it is noise · clip / n.
        """
        for place, update in enumerate(updates):
            change = self.clipped(update.state[:weights] - before[:weights])
            if place == 0:
                change = change + self.draw(change, stream)
            update.state = torch.cat([before[:weights] + change, update.state[weights:]])
            update.samples = 1
            yield update


PRIVACY = (ClientDP, CentralDP)


class Accountant:
    """ε at δ of so many uses of the Gaussian mechanism on a random share of the clients."""

    def __init__(self, noise: float, sampling_rate: float, delta: float) -> None:
        try:
            from opacus.accountants.analysis import rdp  # noqa: PLC0415 - an extra, and slow to import
        except ModuleNotFoundError as error:
            raise MissingExtraError("opacus", "privacy", "Accounting for privacy") from error
        self._analysis: Any = rdp
        self._delta = delta
        self._of_one_use = rdp.compute_rdp(q=sampling_rate, noise_multiplier=noise, steps=1, orders=ORDERS)

    def epsilon(self, uses: int) -> float:
        """Return ε after so many uses."""
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that the best order is the first or last: ε is an upper bound all the same
            spent, _ = self._analysis.get_privacy_spent(orders=ORDERS, rdp=self._of_one_use * uses, delta=self._delta)
        return float(spent)


def accountant_of(experiment: Experiment) -> Accountant | None:
    """Return the accountant of an experiment; None if it adds no noise.

    Of `client_dp` the server knows who has sent, so that drawing a cohort hides nobody. With secure aggregation it sees
    sums alone, which hold the noise of as many clients as must be left.
    """
    privacy = experiment.privacy
    if privacy is None or privacy.noise == 0:
        return None
    if isinstance(privacy, CentralDP):
        return Accountant(privacy.noise, sampling_rate(experiment), privacy.delta)
    secure, summed = experiment.secure_aggregation, 1
    if secure is not None:
        summed = min(secure.fewest(experiment.asked(number)) for number in experiment.distinct_rounds)
    return Accountant(privacy.noise * math.sqrt(summed), 1.0, privacy.delta)


def sampling_rate(experiment: Experiment) -> float:
    """Return the largest share of clients that is asked in a round; 1 where clients are not drawn for each round."""
    if isinstance(experiment.topology, Asynchronous):
        return 1.0
    rounds = experiment.distinct_rounds
    return min(1.0, max(experiment.asked(number) / len(experiment.members(number)) for number in rounds))


def protect_on_client(federation: Federation, update: Update) -> None:
    """Apply `client_dp` to an update, and count it."""
    privacy, e = federation.experiment.privacy, federation.experiment
    if isinstance(privacy, ClientDP):
        stream = streams.stream(e.seed, "privacy", federation.round, update.node)
        privacy.protect(update, federation.site.layout.weights, stream)
        uses: dict[Node, int] = federation.server.notes.setdefault(NOTE, {})
        uses[update.node] = uses.get(update.node, 0) + 1


def protect_at_server(federation: Federation, updates: Iterable[Update], before: Tensor) -> Iterable[Update]:
    """Apply `central_dp` to the updates of one aggregation."""
    privacy, e = federation.experiment.privacy, federation.experiment
    if not isinstance(privacy, CentralDP):
        return updates
    stream = streams.stream(e.seed, "privacy", federation.round)
    return privacy.protect(updates, before, federation.site.layout.weights, stream)


def privacy_metrics(federation: Federation) -> dict[str, float]:
    """Return ε after this round, the largest of all clients, and report that of each client with `client_dp`."""
    accountant = federation.accountant
    if accountant is None:
        return {}
    if isinstance(federation.experiment.privacy, CentralDP):
        return {EPSILON: accountant.epsilon(federation.round + 1)}
    uses: dict[Node, int] = federation.server.notes.get(NOTE, {})
    spent = {count: accountant.epsilon(count) for count in {*uses.values()}}
    federation.observer.log_each(EPSILON, {node: spent[count] for node, count in uses.items()})
    return {EPSILON: max(spent.values(), default=0.0)}


def require_mean(what: str, experiment: Experiment) -> None:
    """Raise ConfigError unless the aggregator uses the mean of the updates alone."""
    if not isinstance(experiment.aggregator, MEANS):
        kind, known = kind_of(type(experiment.aggregator).__name__), ", ".join(kind_of(m.__name__) for m in MEANS)
        raise ConfigError(
            f"{what} gives the mean of all updates, and the aggregator {kind} needs more. Possible: {known}."
        )


def require_no_buffers(site: Site) -> None:
    """Raise ConfigError if a model's running statistics would leave clients unprotected."""
    e, layout = site.experiment, site.layout
    if layout.size != layout.weights and (e.privacy is not None or e.secure_aggregation is not None):
        raise ConfigError(
            f"The model '{type(e.model).__name__}' has running statistics (batch norm), which would leave the clients "
            "without noise or masks. Take a model without, such as one with group norm."
        )


def _require_topology(
    privacy: DifferentialPrivacy, experiment: Experiment, possible: tuple[type, ...], why: str
) -> None:
    if not isinstance(experiment.topology, possible):
        kind, names = kind_of(type(experiment.topology).__name__), ", ".join(kind_of(t.__name__) for t in possible)
        own = kind_of(type(privacy).__name__)
        raise ConfigError(f"{own} does not protect the topology {kind}, where {why}. Possible: {names}.")
