# SPDX-License-Identifier: Apache-2.0
"""Text as bytes, for language models: a folder of files, by default Python's own standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.data.arrays import Arrays
from fedvitals.lab.description import Description, require

TEST_PART = 10  # every so many-th block of a package is in the test set
PUBLIC_FACTOR = 20  # public text, in multiples of a package's limit
# Not code that a person would write: tests, generated tables, and what pip has put there.
EXCLUDED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3", "pydoc_data"}


class Text(Description, frozen=True):
    """Language modelling on bytes: blocks of text with the byte that follows each byte as its target, 256 tokens.

    Each subfolder is a package: a group, for the partitions `group_per_client` and `natural`. Files directly
    in the folder are public: no client holds them, and a model can be pretrained on them.

    Args:
        folder: The folder; None: Python's standard library.
        pattern: Which files are read.
        steps: Bytes in a block.
        package_bytes: How many bytes of each package are used, from its beginning.
        packages: How many packages are used, the largest first.
    """

    folder: str | None = None
    pattern: str = "*.py"
    steps: int = 64
    package_bytes: int = 40_000
    packages: int = 10

    def __post_init__(self) -> None:
        require(self.steps >= 2, "steps of text", self.steps, "at least 2")
        least = 20 * (self.steps + 1)
        require(
            self.package_bytes >= least, "package_bytes of text", self.package_bytes, f"at least {least}: twenty blocks"
        )
        require(self.packages >= 1, "packages of text", self.packages, "at least 1")

    def make(self) -> Arrays:
        root = Path(self.folder or sysconfig.get_paths()["stdlib"])
        texts = self._packages(root)
        blocks = [_blocks(text, self.steps) for text in texts.values()]
        test = [torch.arange(len(own)) % TEST_PART == TEST_PART - 1 for own in blocks]
        train_blocks = torch.cat([own[~mask] for own, mask in zip(blocks, test, strict=True)])
        test_blocks = torch.cat([own[mask] for own, mask in zip(blocks, test, strict=True)])
        groups = torch.cat([torch.full((int((~mask).sum()),), place) for place, mask in enumerate(test)])
        public = _read(sorted(root.glob(self.pattern)), PUBLIC_FACTOR * self.package_bytes)
        return Arrays(
            *(train_blocks[:, :-1], train_blocks[:, 1:], test_blocks[:, :-1], test_blocks[:, 1:], groups),
            classes=256,
            name="text",
            public=_blocks(public, self.steps) if len(public) > self.steps else None,
        )

    def _packages(self, root: Path) -> dict[str, bytes]:
        """Return the text of the largest packages, by name, in the order of their names."""
        if not root.is_dir():
            raise ConfigError(f"There is no folder {root} for the data set text.")
        contents: dict[str, bytes] = {}
        for package in sorted(root.iterdir()):
            if package.is_dir() and package.name not in EXCLUDED and not package.name.startswith("."):
                files = [file for file in sorted(package.rglob(self.pattern)) if not EXCLUDED & {*file.parts}]
                text = _read(files, self.package_bytes)
                if len(text) >= 20 * (self.steps + 1):
                    contents[package.name] = text
        if not contents:
            raise ConfigError(
                f"No subfolder of {root} has {20 * (self.steps + 1)} bytes of files named {self.pattern}: a package is "
                "a subfolder, and each client needs some blocks of it. Take a smaller `steps`, or another `pattern`."
            )
        largest = sorted(contents, key=lambda name: (-len(contents[name]), hashlib.sha256(name.encode()).digest()))
        return {name: contents[name] for name in sorted(largest[: self.packages])}


def _read(files: list[Path], limit: int) -> bytes:
    """Return the first `limit` bytes of the files one after the other."""
    parts, size = [], 0
    for file in files:
        if size >= limit:
            break
        try:
            parts.append(file.read_bytes()[: limit - size])
        except OSError:
            continue  # a dangling link, or not ours to read
        size += len(parts[-1])
    return b"".join(parts)


def _blocks(text: bytes, steps: int) -> Tensor:
    """Return the text as consecutive blocks of `steps` tokens and the one that follows, [blocks, steps + 1]."""
    values = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
    return values.unfold(0, steps + 1, steps).contiguous()
