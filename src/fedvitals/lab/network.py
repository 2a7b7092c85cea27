# SPDX-License-Identifier: Apache-2.0
"""How long everything would have taken: a virtual clock from links, devices and chance, without any sleeping.

A node's link and device are drawn once from (seed, node), a journey's chances from (seed, round, node): neither the
number of processes nor the other clients change them. Times are whole ticks of 2⁻²⁰ s, so that sums of them are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from fedvitals.errors import ConfigError, unknown
from fedvitals.lab.description import Description, require
from fedvitals.lab.profiles import DEVICES, LINKS, Device, Link
from fedvitals.lab.streams import numpy_stream
from fedvitals.lab.work import Node

TICKS_PER_SECOND = 2**20

Choice = str | dict[str, float]


class Network(Description, frozen=True):
    """Links and devices of the nodes, and how a round deals with the slow and the absent.

    `links` and `devices` are one name, or shares of names from which each node draws: `{"4g": 0.7, "3g": 0.3}`.
    `profiles` adds own ones by name; `overrides` gives single nodes theirs: `{"c3": ["lora", "phone"]}`.
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
    server: str = "server"  # the device that aggregates

    def __post_init__(self) -> None:
        require(0 <= self.spread <= 3, "spread of network", self.spread, "from 0 to 3")
        require(0 <= self.jitter <= 3, "jitter of network", self.jitter, "from 0 to 3")
        require(0 <= self.availability <= 1, "availability of network", self.availability, "from 0 to 1")
        deadline = self.deadline_seconds
        allowed = deadline is None or (math.isfinite(deadline) and deadline > 0)
        require(allowed, "deadline_seconds of network", deadline, "finite and above 0, or None")
        more = self.over_selection
        require(math.isfinite(more) and more >= 1, "over_selection of network", more, "1 or more")
        for name, profile in self.profiles.items():
            taken = LINKS if isinstance(profile, Device) else DEVICES
            require(name not in taken, "name of an own profile", name, "none of the other sort's names")
        links, devices = links_of(self), devices_of(self)
        checked_choice(self.links, links, "link")
        checked_choice(self.devices, devices, "device")
        checked_choice(self.server, devices, "device")
        overrides = {
            node: (names,) if isinstance(names, str) else tuple(names) for node, names in self.overrides.items()
        }
        for node, names in overrides.items():
            for name in names:
                if name not in links and name not in devices:
                    raise ConfigError(f"Override of {node}: {unknown('link or device', name, [*links, *devices])}")
        msgspec.structs.force_setattr(self, "overrides", overrides)

    def selected(self, needed: int, clients: int) -> int:
        """How many clients to ask in order to hear from `needed` of them."""
        return min(clients, math.ceil(needed * self.over_selection - 1e-9))


@dataclass(frozen=True, slots=True)
class Journey:
    """One client's round: the model comes, is trained, and goes back. Times in virtual seconds."""

    node: Node
    began: float = 0.0
    available: bool = True
    download: float = 0.0
    compute: float = 0.0
    upload: float = 0.0
    lost: bool = False  # the update never arrives
    corrupted: bool = False  # it arrives, and cannot be used
    clock_offset: float = 0.0  # by how much the node's own clock is ahead

    @property
    def total(self) -> float:
        return self.download + self.compute + self.upload

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
class Stretch:
    """What a node did from when to when; becomes a span."""

    node: Node
    name: str  # «download», «compute», «upload», «wait», «away», «aggregate»
    began: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Timetable:
    """A synchronous round on the virtual clock."""

    began: float
    seconds: float
    accepted: tuple[Node, ...]  # in the order of their arrival
    late: tuple[Node, ...]  # still under way when the round was closed
    failed: tuple[Node, ...]  # lost or corrupted on the way
    absent: tuple[Node, ...]  # never began
    stretches: tuple[Stretch, ...]

    @property
    def ends(self) -> float:
        return self.began + self.seconds


def profile_of(network: Network, node: Node, seed: int) -> tuple[Link, Device]:
    """The node's link and device, the same in every round."""
    chance = numpy_stream(seed, "network profile", node)
    link_draw, device_draw, *normals = [*chance.random(2), *chance.standard_normal(2)]
    links, devices = links_of(network), devices_of(network)
    link, device = links[drawn(network.links, link_draw)], devices[drawn(network.devices, device_draw)]
    for name in network.overrides.get(node, ()):
        link, device = links.get(name, link), devices.get(name, device)
    rate, speed = (math.exp(network.spread * normal) for normal in normals)
    link = msgspec.structs.replace(
        link,
        download_bits_per_second=link.download_bits_per_second * rate,
        upload_bits_per_second=link.upload_bits_per_second * rate,
    )
    return link, msgspec.structs.replace(device, flops_per_second=device.flops_per_second * speed)


def journey(
    network: Network,
    node: Node,
    round: int,  # noqa: A002 - the vocabulary's word
    bytes_down: int,
    bytes_up: int,
    flops: float,
    seed: int,
    *,
    began: float = 0.0,
    messages: int = 1,
) -> Journey:
    """What the node's round takes. Bytes are totals of all `messages` each way, each of which pays the latency."""
    link, device = profile_of(network, node, seed)
    # Drawn always and in this order, so that one setting does not shift the chances of another.
    chance = numpy_stream(seed, "network journey", round, node)
    here, loss = chance.random(2)
    # exp(σz − σ²/2) has the mean 1: jitter spreads times, it does not slow the network down.
    jitter = np.exp(network.jitter * chance.standard_normal(3) - network.jitter**2 / 2)
    latency = messages * link.latency_seconds
    seconds = (
        latency + 8 * bytes_down / (link.download_bits_per_second * link.duty),
        flops / device.flops_per_second,
        latency + 8 * bytes_up / (link.upload_bits_per_second * link.duty),
    )
    times = [tick(float(mean * factor)) for mean, factor in zip(seconds, jitter, strict=True)]
    return Journey(
        node,
        began=tick(began),
        available=bool(here < network.availability),
        download=times[0],
        compute=times[1],
        upload=times[2],
        lost=bool(loss < link.loss),
    )


def aggregation_seconds(network: Network, updates: int, size: int) -> float:
    """What averaging takes at the server: one multiplication and one addition for each value of each update."""
    return tick(2 * updates * size / devices_of(network)[network.server].flops_per_second)


def synchronous(
    journeys: Sequence[Journey],
    *,
    began: float = 0.0,
    needed: int | None = None,
    deadline: float | None = None,
    aggregate: float = 0.0,
    server: Node = "server",
) -> Timetable:
    """When the round ends, who is in it, and what everybody did all the time.

    The server waits until `needed` usable updates are there (all, unless told), or for `deadline` seconds. It closes
    earlier if nothing is under way any more. Who is not available says so at once; of a lost update it learns at the
    deadline, or without one when the update would have come. Every node's stretches add up to the round's length.
    """
    began, aggregate = tick(began), tick(aggregate)
    under_way = sorted((one for one in journeys if one.available), key=lambda one: (lasting(one), one.node))
    limit = math.inf if deadline is None else tick(deadline)
    needed = len(under_way) if needed is None else needed
    accepted = [one for one in under_way if one.usable and lasting(one) <= limit][:needed]
    if accepted and len(accepted) >= needed:
        collected = lasting(accepted[-1])
    elif deadline is not None and any(one.lost or lasting(one) > limit for one in under_way):
        collected = limit
    else:
        collected = max((lasting(one) for one in under_way), default=0.0)
    if math.isinf(collected):
        slowest = under_way[-1].node
        raise ConfigError(f"The round never ends: {slowest} takes for ever. Give the network a deadline_seconds.")
    seconds = collected + aggregate
    stretches = [part for one in journeys for part in stretches_of(one, began, collected, seconds)]
    stretches += [Stretch(server, "wait", began, collected), Stretch(server, "aggregate", began + collected, aggregate)]
    chosen = {one.node for one in accepted}
    rest = [one for one in under_way if one.node not in chosen]
    return Timetable(
        began,
        seconds,
        tuple(one.node for one in accepted),
        late=tuple(one.node for one in rest if one.usable),
        failed=tuple(one.node for one in rest if not one.usable),
        absent=tuple(one.node for one in journeys if not one.available),
        stretches=tuple(stretches),
    )


def stretches_of(one: Journey, began: float, collected: float, seconds: float) -> Iterable[Stretch]:
    """One node's time in the round; what it had not done when the server closed is cut off."""
    if not one.available:
        yield Stretch(one.node, "away", began, seconds)
        return
    at = 0.0
    for name in ("download", "compute", "upload"):
        lasts = min(tick(getattr(one, name)), collected - at)
        yield Stretch(one.node, name, began + at, lasts)
        at += lasts
    yield Stretch(one.node, "wait", began + at, seconds - at)


def tick(seconds: float) -> float:
    """The nearest whole tick; what never ends stays so."""
    return seconds if math.isinf(seconds) else round(seconds * TICKS_PER_SECOND) / TICKS_PER_SECOND


def lasting(one: Journey) -> float:
    """A journey's length in whole ticks; a fault may have put in any number."""
    return tick(one.download) + tick(one.compute) + tick(one.upload)


def links_of(network: Network) -> dict[str, Link]:
    """All links by name: the ready-made, and the experiment's own, which come first."""
    return {**LINKS, **{name: one for name, one in network.profiles.items() if isinstance(one, Link)}}


def devices_of(network: Network) -> dict[str, Device]:
    """All devices by name, in the same way."""
    return {**DEVICES, **{name: one for name, one in network.profiles.items() if isinstance(one, Device)}}


def checked_choice(choice: Choice, known: Iterable[str], what: str) -> None:
    """Refuses names that do not exist and shares that are none."""
    for name in (choice,) if isinstance(choice, str) else choice:
        if name not in known:
            raise ConfigError(unknown(what, name, known))
    if isinstance(choice, dict):
        shares = list(choice.values())
        fine = bool(shares) and min(shares) >= 0 and math.isclose(sum(shares), 1, abs_tol=1e-6)
        require(fine, f"{what}s of network", choice, "shares, 0 or more, that add up to 1")


def drawn(choice: Choice, draw: float) -> str:
    """The name at this place between 0 and 1; names in order, since equal descriptions must draw alike."""
    if isinstance(choice, str):
        return choice
    names = sorted(name for name, share in choice.items() if share > 0)
    passed = np.cumsum([choice[name] for name in names])
    return names[min(int(np.searchsorted(passed, draw, side="right")), len(names) - 1)]


def times_told(journey: Journey) -> dict[str, float]:
    """What a server reads from the times that stand in a client's message, and those of its own clock around them.

    The offset of the client's clock is NTP's; half of the time under way is the most by which that can be wrong.
    """
    asked, came = journey.began, journey.ends
    began = journey.began + journey.download + journey.clock_offset
    ended = began + journey.compute
    offset = ((began - asked) + (ended - came)) / 2
    error = max(0.0, abs(offset) - (journey.download + journey.upload) / 2)
    told = {"time.client_virtual": came - asked, "time.compute_virtual": ended - began}
    # Ticks of 2⁻²⁰ s: what is below a thousandth is rounding.
    return told if error < 1e-3 else {**told, "time.clock_error": math.copysign(error, offset)}
