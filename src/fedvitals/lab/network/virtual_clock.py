# SPDX-License-Identifier: Apache-2.0
"""The virtual clock: how long a round would take, from links, devices and random variation, without sleeping.

A node's link and device are drawn once from (seed, node), a journey's variation from (seed, round, node): neither the
number of processes nor the other clients change them. Times are whole ticks of 2⁻²⁰ s, so that their sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from fedvitals.errors import ConfigError, unknown
from fedvitals.lab.description import Description, require
from fedvitals.lab.engines.tasks import Node
from fedvitals.lab.network.profiles import DEVICES, LINKS, Device, Link
from fedvitals.lab.streams import numpy_stream

TICKS_PER_SECOND = 2**20

Choice = str | dict[str, float]


class Network(Description, frozen=True):
    """The links and devices of the nodes, and how a round treats slow and absent ones.

    Args:
        links: The link of every node by its name (docs/lab.md lists them), or shares of names from which each node
            draws: `{"4g": 0.7, "3g": 0.3}`.
        devices: The device of every node, in the same way.
        profiles: Links and devices of your own, by name: `lab.Link` and `lab.Device`.
        overrides: Links and devices of single nodes: `{"c3": ["lora", "phone"]}`.
        spread: σ of the log-normal factor of a node's own rates and speed; the median node has its profile's.
        jitter: σ of the log-normal factor of each single time; its mean is 1.
        availability: The probability that a node answers in a round.
        deadline_seconds: The server closes a round after this time; None: it waits.
        over_selection: The factor by which more clients are asked than are needed; 1.3 in Bonawitz et al. 2019.
        server: The device that aggregates and evaluates.
        server_bits_per_second: The rate of the server's line, on which models are sent one after the other; None: no
            limit.
        edge_links: The links between edge nodes and the server; None: they take no time.
    """

    links: Choice = "fibre"
    devices: Choice = "laptop"
    profiles: dict[str, Link | Device] = msgspec.field(default_factory=dict)
    overrides: dict[str, str | tuple[str, ...]] = msgspec.field(default_factory=dict)
    spread: float = 0.0  # σ of the log-normal factor of a node's own rates and speed; the median node has its profile's
    jitter: float = 0.0  # σ of the log-normal factor of each single time; its mean is 1
    availability: float = 1.0  # probability that a node answers in a round
    deadline_seconds: float | None = None
    over_selection: float = 1.0  # so many times more clients are asked than are needed; 1.3 in Bonawitz et al. 2019
    server: str = "server"  # the device that aggregates and evaluates
    server_bits_per_second: float | None = None  # of its line: models go out one after the other; None: no limit
    edge_links: Choice | None = None  # between edge nodes and the server; None: that way takes no time

    def __post_init__(self) -> None:
        require(0 <= self.spread <= 3, "spread of network", self.spread, "from 0 to 3")
        require(0 <= self.jitter <= 3, "jitter of network", self.jitter, "from 0 to 3")
        require(0 <= self.availability <= 1, "availability of network", self.availability, "from 0 to 1")
        deadline = self.deadline_seconds
        allowed = deadline is None or (math.isfinite(deadline) and deadline > 0)
        require(allowed, "deadline_seconds of network", deadline, "finite and above 0, or None")
        more = self.over_selection
        require(math.isfinite(more) and more >= 1, "over_selection of network", more, "1 or more")
        line = self.server_bits_per_second
        allowed = line is None or (math.isfinite(line) and line > 0)
        require(allowed, "server_bits_per_second of network", line, "finite and above 0, or None")
        for name, profile in self.profiles.items():
            taken = LINKS if isinstance(profile, Device) else DEVICES
            require(name not in taken, "name of an own profile", name, "none of the other sort's names")
        links, devices = known_links(self), known_devices(self)
        check_choice(self.links, links, "link")
        check_choice(self.links if self.edge_links is None else self.edge_links, links, "link")
        check_choice(self.devices, devices, "device")
        check_choice(self.server, devices, "device")
        overrides = {
            node: (names,) if isinstance(names, str) else tuple(names) for node, names in self.overrides.items()
        }
        for node, names in overrides.items():
            for name in names:
                if name not in links and name not in devices:
                    raise ConfigError(f"Override of {node}: {unknown('link or device', name, [*links, *devices])}")
        msgspec.structs.force_setattr(self, "overrides", overrides)

    def selected(self, needed: int, clients: int) -> int:
        """Return how many clients to select in order to receive `needed` updates."""
        return min(clients, math.ceil(needed * self.over_selection - 1e-9))


@dataclass(frozen=True, slots=True)
class Journey:
    """One client's round: it downloads the model, trains it, and uploads the update. Times in virtual seconds."""

    node: Node
    began: float = 0.0
    available: bool = True
    download: float = 0.0
    compute: float = 0.0
    upload: float = 0.0
    lost: bool = False  # the update never arrives
    corrupted: bool = False  # it arrives, and cannot be used
    clock_offset: float = 0.0  # by how much the node's own clock is ahead
    queue: float = 0.0  # until the server, or the edge, begins to send to it
    data: float = 0.0  # reading and preparing samples
    group: str | None = None
    messages: int = 1  # each way; more than one where a group exchanges after each iteration: times are sums of theirs

    @property
    def total(self) -> float:
        return self.queue + self.download + self.data + self.compute + self.upload

    @property
    def ends(self) -> float:
        return self.began + self.total

    @property
    def arrived(self) -> bool:
        return self.available and not self.lost

    @property
    def usable(self) -> bool:
        return self.arrived and not self.corrupted


@dataclass(frozen=True, slots=True)
class EdgeTransfer:
    """An edge node's own transfers from and to the server, in virtual seconds."""

    queue: float = 0.0
    download: float = 0.0
    upload: float = 0.0


def profile_of(network: Network, node: Node, seed: int) -> tuple[Link, Device]:
    """Return the node's link and device, which are the same in every round."""
    chance = numpy_stream(seed, "network profile", node)
    link_draw, device_draw, *normals = [*chance.random(2), *chance.standard_normal(2)]
    links, devices = known_links(network), known_devices(network)
    link, device = links[draw_name(network.links, link_draw)], devices[draw_name(network.devices, device_draw)]
    for name in network.overrides.get(node, ()):
        link, device = links.get(name, link), devices.get(name, device)
    rate, speed = (math.exp(network.spread * normal) for normal in normals)
    link = msgspec.structs.replace(
        link,
        download_bits_per_second=link.download_bits_per_second * rate,
        upload_bits_per_second=link.upload_bits_per_second * rate,
    )
    reading = device.samples_per_second
    device = msgspec.structs.replace(
        device,
        flops_per_second=device.flops_per_second * speed,
        samples_per_second=None if reading is None else reading * speed,
    )
    return link, device


def plan_journey(
    network: Network,
    node: Node,
    round_index: int,
    bytes_down: int,
    bytes_up: int,
    flops: float,
    seed: int,
    *,
    began: float = 0.0,
    messages: int = 1,
    samples: int = 0,
    queue: float = 0.0,
    line: float | None = None,
    group: str | None = None,
) -> Journey:
    """Return the journey of a node in a round. Bytes are totals over all `messages` each way, each with its own
    latency.

    `samples` is how many are read and prepared; `line` is the sender's bandwidth in bits per second, if it is limited.
    """
    link, device = profile_of(network, node, seed)
    # Drawn always and in this order, so that one setting does not shift the chances of another.
    chance = numpy_stream(seed, "network journey", round_index, node)
    here, loss = chance.random(2)
    # exp(σz − σ²/2) has the mean 1: jitter spreads times, it does not slow the network down.
    jitter = np.exp(network.jitter * chance.standard_normal(4) - network.jitter**2 / 2)
    latency, rate = messages * link.latency_seconds, link.download_bits_per_second * link.duty
    held_up = 0.0 if line is None or line >= rate else 8 * bytes_down / messages * (1 / line - 1 / rate)
    seconds = (
        latency + 8 * bytes_down / rate + held_up,
        flops / device.flops_per_second,
        latency + 8 * bytes_up / (link.upload_bits_per_second * link.duty),
        0.0 if device.samples_per_second is None else samples / device.samples_per_second,
    )
    times = [to_ticks(float(mean * factor)) for mean, factor in zip(seconds, jitter, strict=True)]
    return Journey(
        node,
        began=to_ticks(began),
        available=bool(here < network.availability),
        download=times[0],
        compute=times[1],
        upload=times[2],
        lost=bool(loss < link.loss),
        queue=to_ticks(queue),
        data=times[3],
        group=group,
        messages=messages,
    )


def sending_seconds(network: Network, size: int, receivers: int) -> float:
    """Return the seconds that the server's line needs to send this many bytes to the receivers, one after the other."""
    line = network.server_bits_per_second
    return 0.0 if line is None else to_ticks(8 * size * receivers / line)


def edge_transfer(
    network: Network, edge: Node, round_index: int, size: int, seed: int, queue: float = 0.0
) -> EdgeTransfer:
    """Return the times in which an edge node receives a model of `size` bytes from the server and sends one back."""
    links, line = known_links(network), network.server_bits_per_second or math.inf
    own = any(name in links for name in network.overrides.get(edge, ()))
    if network.edge_links is None and not own:
        return EdgeTransfer(queue, to_ticks(8 * size / line), 0.0)
    choice = network.links if network.edge_links is None else network.edge_links
    link, _ = profile_of(msgspec.structs.replace(network, links=choice), edge, seed)
    normals = numpy_stream(seed, "network edge", round_index, edge).standard_normal(2)
    down, up = np.exp(network.jitter * normals - network.jitter**2 / 2).tolist()
    rates = min(link.download_bits_per_second * link.duty, line), link.upload_bits_per_second * link.duty
    there, back = (link.latency_seconds + 8 * size / rate for rate in rates)
    return EdgeTransfer(queue, to_ticks(there * down), to_ticks(back * up))


def evaluation_seconds(network: Network, samples: int, flops: float) -> float:
    """Return the seconds that evaluating the model takes at the server."""
    return to_ticks(samples * flops / known_devices(network)[network.server].flops_per_second)


def aggregation_seconds(network: Network, updates: int, size: int) -> float:
    """Return the seconds of averaging at the server: a multiplication and an addition per value of each update."""
    return to_ticks(2 * updates * size / known_devices(network)[network.server].flops_per_second)


def to_ticks(seconds: float) -> float:
    """Round seconds to the nearest whole tick; infinity stays infinite."""
    return seconds if math.isinf(seconds) else round(seconds * TICKS_PER_SECOND) / TICKS_PER_SECOND


def known_links(network: Network) -> dict[str, Link]:
    """Return all links by name; the experiment's own take precedence over the built-in ones."""
    return {**LINKS, **{name: profile for name, profile in network.profiles.items() if isinstance(profile, Link)}}


def known_devices(network: Network) -> dict[str, Device]:
    """Return all devices by name; the experiment's own take precedence over the built-in ones."""
    return {**DEVICES, **{name: profile for name, profile in network.profiles.items() if isinstance(profile, Device)}}


def check_choice(choice: Choice, known: Iterable[str], what: str) -> None:
    """Raise ConfigError for unknown names and invalid shares."""
    for name in (choice,) if isinstance(choice, str) else choice:
        if name not in known:
            raise ConfigError(unknown(what, name, known))
    if isinstance(choice, dict):
        shares = list(choice.values())
        fine = bool(shares) and min(shares) >= 0 and math.isclose(sum(shares), 1, abs_tol=1e-6)
        require(fine, f"{what}s of network", choice, "shares, 0 or more, that add up to 1")


def draw_name(choice: Choice, draw: float) -> str:
    """Return the name at this position between 0 and 1; names are sorted, so that equal descriptions draw alike."""
    if isinstance(choice, str):
        return choice
    names = sorted(name for name, share in choice.items() if share > 0)
    passed = np.cumsum([choice[name] for name in names])
    return names[min(int(np.searchsorted(passed, draw, side="right")), len(names) - 1)]
