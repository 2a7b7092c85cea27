# SPDX-License-Identifier: Apache-2.0
"""The debugger's prompt, its scripts, and the progress bar shown while rounds are rerun."""

from __future__ import annotations

import cmd
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from fedvitals.cli.screen import new_progress
from fedvitals.errors import ConfigError, FedvitalsError

if TYPE_CHECKING:
    from fedvitals.replay.debugger.commands import Interpreter
    from fedvitals.replay.debugger.debugger_output import DebuggerOutput
    from fedvitals.replay.debugger.session import Session

LEAVE = ("quit", "exit", "q", "EOF")
REPEATED = ("step", "s", "next", "n", "back")  # repeated by an empty line
HISTORY = 1000  # lines


class Prompt(cmd.Cmd):
    """Ctrl-D leaves, Tab completes, an empty line repeats a step. A wrong command only prints an error."""

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self._interpreter, self._before, self._found = interpreter, "", list[str]()

    @property
    def prompt(self) -> str:  # type: ignore[override]
        session = self._interpreter.session
        place = f"{session.round}" if session.node is None else f"{session.round} {session.node}:{session.step_number}"
        return f"(replay {place}) "

    def onecmd(self, line: str) -> bool:
        line = line.strip()
        if line in LEAVE:
            if line == "EOF":
                click.echo()
            return True
        line = line or (self._before if self._before.partition(" ")[0] in REPEATED else "")
        self._before = line
        try:
            for _, result in results(self._interpreter, [line]):
                if str(result):
                    click.echo(str(result))
        except FedvitalsError as error:
            click.echo(str(error), err=True)
        except KeyboardInterrupt:
            click.echo("Interrupted. Ctrl-D leaves.", err=True)
        return False

    def complete(self, text: str, state: int) -> str | None:  # type: ignore[override]
        import readline

        if state == 0:
            line = readline.get_line_buffer()[: readline.get_endidx()].lstrip()
            self._found = self._interpreter.complete(text, line.rpartition(";")[2].lstrip())
        return f"{self._found[state]} " if state < len(self._found) else None

    def loop(self) -> None:
        """Read commands until the user leaves; Ctrl-C only clears the line."""
        greeting = "Tab completes, `help` lists the commands, Ctrl-D leaves."
        with _history():
            while True:
                try:
                    self.cmdloop(greeting)
                except KeyboardInterrupt:
                    click.echo()
                    greeting = ""
                    continue
                return


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Load and save the commands of earlier sessions, if this system has readline and a place for them."""
    try:
        import readline
    except ModuleNotFoundError:  # Windows
        yield
        return
    before = readline.get_completer_delims()
    readline.set_completer_delims(" \t\n;")  # the other characters occur in names of layers and clients
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedvitals"
    with contextlib.suppress(OSError):
        readline.read_history_file(folder / "replay_history")
    try:
        yield
    finally:
        readline.set_completer_delims(before)
        readline.set_history_length(HISTORY)
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(folder / "replay_history")


def results(
    interpreter: Interpreter, lines: Iterable[str], *, named: bool = False
) -> Iterator[tuple[str, DebuggerOutput | str]]:
    """Yield the result of each command. The first wrong command ends it; `named`: the error says which one it was."""
    from fedvitals.replay.debugger.commands import split_commands

    for line in lines:
        for part in split_commands(line):
            if part in LEAVE:
                return
            try:
                result = interpreter.do(part)
            except FedvitalsError as error:
                if not named:
                    raise
                raise ConfigError(f"`{part}`: {error}") from error
            yield part, result


def lines_of(script: str | None, commands: tuple[str, ...]) -> list[str]:
    """Return the lines of a script (or «-», standard input), then those of the command line."""
    lines: list[str] = []
    if script is not None:
        try:
            lines = (sys.stdin.read() if script == "-" else Path(script).read_text(encoding="utf-8")).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The script '{script}' cannot be read: {error}") from error
    return [*lines, *commands]


class ProgressBar:
    """A bar on a terminal while rounds are rerun; nothing elsewhere."""

    def __init__(self, session: Session, *, quiet: bool) -> None:
        self._bar: Any = None
        self._shown = not quiet and sys.stderr.isatty()
        session.progress = self.show_progress

    def show_progress(self, number: int, first: int, last: int) -> None:
        """Show how many rounds are done."""
        if not self._shown or first == last:
            return
        if self._bar is None:
            self._bar = new_progress(transient=True)
            self._bar.start()
            self._bar.add_task(f"rounds {first}–{last} again", total=last - first + 1)
        self._bar.update(self._bar.task_ids[0], completed=number - first + 1)
        if number >= last:
            self.stop()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
