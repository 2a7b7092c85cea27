# SPDX-License-Identifier: Apache-2.0
"""Named profiles of links and devices, each number with its source or reason."""

from __future__ import annotations

import math
from types import MappingProxyType

from fedvitals.lab.description import Description, require


class Link(Description, frozen=True):
    """A node's network connection.

    Args:
        download_bits_per_second: Its rate towards the node.
        upload_bits_per_second: Its rate from the node.
        latency_seconds: The latency in one direction.
        duty: The share of time in which a sender may be on the air.
        loss: The probability that an update never arrives, in spite of the transport's retries.
    """

    download_bits_per_second: float
    upload_bits_per_second: float
    latency_seconds: float = 0.0
    duty: float = 1.0  # the share of time in which a sender may be on the air
    loss: float = 0.0  # probability that an update never arrives, after all that the transport repeats

    def __post_init__(self) -> None:
        for name in ("download_bits_per_second", "upload_bits_per_second"):
            rate = getattr(self, name)
            require(math.isfinite(rate) and rate > 0, f"{name} of a link", rate, "finite and above 0")
        latency = self.latency_seconds
        require(math.isfinite(latency) and latency >= 0, "latency_seconds of a link", latency, "finite, 0 or more")
        require(0 < self.duty <= 1, "duty of a link", self.duty, "above 0, up to 1")
        require(0 <= self.loss <= 1, "loss of a link", self.loss, "from 0 to 1")


class Device(Description, frozen=True):
    """A node's computing power: what it sustains in training, not what its maker states.

    Args:
        flops_per_second: Floating-point operations per second in training.
        memory_bytes: Its memory.
        samples_per_second: Samples that it can read and prepare for training; None: that takes no time.
    """

    flops_per_second: float
    memory_bytes: int
    samples_per_second: float | None = None  # that it reads and prepares before it trains on them; None: in no time

    def __post_init__(self) -> None:
        speed, reading = self.flops_per_second, self.samples_per_second
        require(math.isfinite(speed) and speed > 0, "flops_per_second of a device", speed, "finite and above 0")
        require(self.memory_bytes > 0, "memory_bytes of a device", self.memory_bytes, "above 0")
        allowed = reading is None or (math.isfinite(reading) and reading > 0)
        require(allowed, "samples_per_second of a device", reading, "finite and above 0, or None")


LINKS = MappingProxyType(
    {
        # A usual symmetric tariff of fibre to the home. 9 ms there and back: Ookla's figure for a fibre operator in
        # its US report (Verizon).
        "fibre": Link(300e6, 300e6, latency_seconds=0.0045),
        # WebPageTest's profile «4G»: 9 Mbit/s both ways, 170 ms there and back.
        "4g": Link(9e6, 9e6, latency_seconds=0.085),
        # WebPageTest's profile «3G»: 1.6 Mbit/s down, 768 kbit/s up, 300 ms there and back.
        "3g": Link(1.6e6, 768e3, latency_seconds=0.15),
        # LoRaWAN in Europe at its fastest default rate, spreading factor 7 in 125 kHz (DR5): 5470 bit/s. A sender may
        # be on the air for 1 % of the time there (Regional Parameters, EU863-870, default channels; ETSI EN 300 220),
        # which holds for the gateway too. An answer waits one second (RECEIVE_DELAY1).
        "lora": Link(5470.0, 5470.0, latency_seconds=1.0, duty=0.01),
    }
)

DEVICES = MappingProxyType(
    {
        # One data-centre GPU in float32: an A100 states 19.5 TFLOP/s, about half of it is kept up in large batches.
        "server": Device(10e12, 80 * 10**9),
        # Eight cores of AVX2 at 3 GHz come to 0.8 TFLOP/s on paper; small batches of a small model keep up an eighth.
        "laptop": Device(100e9, 16 * 2**30),
        # Four large cores of NEON at 2.5 GHz come to 160 GFLOP/s on paper; heat and small batches leave a sixteenth.
        # Half of its 6 GiB belongs to the system and other applications.
        "phone": Device(10e9, 3 * 2**30),
    }
)
