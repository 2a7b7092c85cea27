# SPDX-License-Identifier: Apache-2.0
"""The blocks of code in pages: which there are, and how to run them.

A block ```python runs in its page's own namespace. A block ```sh or ```console runs its `fedvitals` commands, in
process. TOML and YAML are parsed. A block whose first line is a comment with a file name, such as `# mine.toml`, is
saved under that name instead. A line before the block says why it is not run here, or which test runs it:

    <!-- not run: needs a GPU -->
    <!-- tested by: tests/monitor/test_corrections.py -->
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

OUTPUT = {"text"}  # what a command prints
COMMANDS = {"sh", "console"}
PYTHON = {"python", "py"}
LANGUAGES = {"toml", "yaml", "json", "sql", "nginx", "promql", *PYTHON, *OUTPUT, *COMMANDS}
_BLOCK = re.compile(r"(?:^<!-- (not run|tested by): ([^>]+) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w-]+\.(?:py|toml))[:\n]")


@dataclass(frozen=True)
class Block:
    """A block of code: its page and line, its language and text; `mark` and `reason` of the comment before it."""

    page: Path
    line: int
    language: str
    code: str
    mark: str = ""
    reason: str = ""

    @property
    def place(self) -> str:
        """The file and the line of its first line, as tracebacks write them."""
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The command lines of a shell block: without prompts, comments and, in a console, what was printed."""
        lines = self.code.replace("\\\n", " ").splitlines()
        if self.language == "console":
            return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page of Markdown, in order.

    Args:
        page: The page's file.
    """
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: match.start(4)].count("\n") + 1, match[3], match[4], match[1] or "", match[2] or "")
        for match in _BLOCK.finditer(text)
    ]


@dataclass
class Player:
    """Runs the blocks of one page in the current folder; `names` is the page's namespace.

    `printed` and `codes` have what each command printed and its exit code.
    """

    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})
    printed: dict[str, str] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)

    def run(self, block: Block) -> None:
        """Run a block.

        Args:
            block: Of any language but SQL and such, which only a test that is named beside it can run.

        Raises:
            ValueError: The block cannot be run, and no reason is given.
        """
        if block.mark or block.language in OUTPUT:
            return
        if saved := _FILE.match(block.code):
            Path(saved[1]).write_text(block.code, encoding="utf-8")
            sys.path.insert(0, str(Path.cwd()))  # as for a program that is started in this folder
        elif block.language in PYTHON:
            code = "\n" * (block.line - 1) + block.code  # so that tracebacks name the page's lines
            exec(compile(code, str(block.page), "exec"), self.names)  # noqa: S102 - our own page
        elif block.language in COMMANDS:
            for line in block.commands:
                self.command(line, block.place)
        elif block.language == "toml":
            tomllib.loads(block.code)
        elif block.language == "json":
            json.loads(block.code)
        elif block.language == "yaml":
            yaml.safe_load(block.code)
        else:
            raise ValueError(f"{block.place}: a block of {block.language or 'no language'} cannot be run: say why")

    def command(self, line: str, place: str) -> None:
        """Run a `fedvitals` command in this process, and keep what it prints and its exit code.

        Args:
            line: The command, as one types it.
            place: Where it stands, for the error.
        """
        from fedvitals.cli.main import main  # noqa: PLC0415 - slow to load

        verb, *arguments = shlex.split(line, comments=True)
        if verb != "fedvitals":
            raise ValueError(f"{place}: only `fedvitals` commands can be run, not {line!r}: say why it is not run")
        printed, code, keyboard = io.StringIO(), 0, sys.stdin
        sys.stdin = io.StringIO()  # nobody is there to answer
        with contextlib.redirect_stdout(printed):
            try:
                main(arguments)
            except SystemExit as done:
                code = int(done.code or 0)
            finally:
                sys.stdin = keyboard
        self.printed[line], self.codes[line] = printed.getvalue(), code
