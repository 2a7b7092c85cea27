# SPDX-License-Identifier: Apache-2.0
"""The command `fedvitals`: one file per verb, loaded when it is called."""

from __future__ import annotations

import importlib
import io
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from fedvitals import __version__
from fedvitals.errors import FedvitalsError, unknown

VERBS = {
    "demo": "fedvitals.cli.demo",
    "runs": "fedvitals.cli.runs",
    "show": "fedvitals.cli.show",
    "ui": "fedvitals.cli.ui",
    "findings": "fedvitals.cli.findings",
    "profile": "fedvitals.cli.profile.command",
    "compare": "fedvitals.cli.compare",
    "report": "fedvitals.cli.report",
    "check": "fedvitals.cli.check",
    "replay": "fedvitals.cli.replay.command",
    "bisect": "fedvitals.cli.bisect",
    "query": "fedvitals.cli.query",
    "export": "fedvitals.cli.export",
    "alerts": "fedvitals.cli.alerts",
    "lab": "fedvitals.cli.lab.command",
    "flower": "fedvitals.cli.flower",
    "doctor": "fedvitals.cli.doctor",
}
STUDIES = ("faultbank", "reproduce", "bench")  # verbs of the distribution fedvitals-studies
PLUGINS = "fedvitals.verbs"  # the entry-point group by which other distributions add verbs


class Verbs(click.Group):
    """Finds a verb's module by its name, so that `--help` starts at once and a verb loads only what it needs."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return [*VERBS, *(name for name in plugin_verbs() if name not in VERBS)]

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        if name in VERBS:
            command: click.Command = importlib.import_module(VERBS[name]).command
            return command
        plugins = plugin_verbs()
        if name in plugins:
            return load_plugin(plugins[name])
        if name in STUDIES:
            raise click.UsageError(
                f"'{name}' comes with the distribution fedvitals-studies: `pip install fedvitals-studies`, "
                "or in a checkout `pip install -e studies`."
            )
        raise click.UsageError(unknown("verb", name, [*VERBS, *plugins]))


def plugin_verbs() -> dict[str, EntryPoint]:
    """Return the verbs that other distributions add, by name. Nothing of them is imported."""
    return {point.name: point for point in entry_points(group=PLUGINS)}


def load_plugin(point: EntryPoint) -> click.Command:
    """Import a verb of another distribution. One that cannot be imported is named, without a traceback."""
    try:
        command = point.load()
    except Exception as error:
        source = point.dist.name if point.dist else point.value
        raise click.ClickException(
            f"The verb '{point.name}' of {source} cannot be loaded ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(command, click.Command):
        raise click.ClickException(f"The verb '{point.name}' ({point.value}) is not a click command.")
    return command


@click.command(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="The store is runs.db here, or what FEDVITALS_STORE names; every verb that reads runs takes --store.",
)
@click.version_option(__version__, message="fedvitals %(version)s")
def app() -> None:
    """The vital signs of federated learning: which client, layer and round is ill, and why."""


def _harmless(text: str) -> str:
    """An error for a terminal: names in it come from stores, and no control character of theirs moves the cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def main(arguments: list[str] | None = None) -> Any:
    """Exit codes: 0 done; 1 trouble found, by a verb that judges; 2 wrong use or nothing to read; 130 interrupted."""
    try:
        sys.exit(app.main(arguments, prog_name="fedvitals", standalone_mode=False) or 0)
    except click.ClickException as error:
        words = io.StringIO()
        error.show(words)
        click.echo(_harmless(words.getvalue()), nl=False, err=True)
        sys.exit(2)
    except FedvitalsError as error:
        click.echo(f"fedvitals: {_harmless(str(error))}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output (head, less) has left: not an error. Nothing more may be written, not even at exit.
        sys.stderr.close()
        sys.exit(0)
