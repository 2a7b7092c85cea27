# SPDX-License-Identifier: Apache-2.0
"""The command `fedvitals`: one file per verb, loaded when it is called."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from fedvitals import __version__
from fedvitals.errors import FedvitalsError, PluginError, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
    "mcp": "fedvitals.cli.mcp",
    "alerts": "fedvitals.cli.alerts",
    "lab": "fedvitals.cli.lab.command",
    "flower": "fedvitals.cli.flower",
    "nvflare": "fedvitals.cli.nvflare",
    "doctor": "fedvitals.cli.doctor",
}
STUDIES = ("faultbank", "reproduce", "bench")  # verbs of the distribution fedvitals-studies, in the order of `--help`
STUDIES_DISTRIBUTION = "fedvitals-studies"


class ClosedOutputError(Exception):
    """The reader of our output, such as `head`, has closed it."""


class Verbs(click.Group):
    """Finds a verb's module by its name, so that `--help` starts at once and a verb loads only what it needs.

    Other distributions add verbs by the entry-point group `fedvitals.verbs`: see `fedvitals.plugins`.
    """

    def list_commands(self, _context: click.Context) -> list[str]:
        return [*VERBS, *plugin_verbs()]

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        """Return a verb; None if no verb has this name, or if a plug-in's verb cannot be loaded."""
        if name in VERBS:
            command: click.Command = importlib.import_module(VERBS[name]).command
            return command
        try:
            return load_plugin(name)
        except (PluginError, click.UsageError):
            return None

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that was called; the error says why there is none."""
        if arguments[0] not in VERBS and not context.resilient_parsing:
            load_plugin(arguments[0])
        return super().resolve_command(context, arguments)

    def invoke(self, context: click.Context) -> Any:
        """Run a verb. Where the reader has closed our output, click and rich would end with 1, which means trouble."""
        try:
            return super().invoke(context)
        except (BrokenPipeError, SystemExit) as error:
            if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
                raise ClosedOutputError from error
            raise

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs, then the plug-ins that are left out, with the reason."""
        super().format_commands(context, formatter)
        reasons = plugins_left_out()
        if reasons:
            with formatter.section("Plug-ins left out"):
                for reason in reasons:
                    formatter.write_text(reason)


@functools.cache
def installed_plugins() -> list[EntryPoint]:
    """Return the verbs that other distributions offer. None is imported."""
    from fedvitals import plugins

    return plugins.installed(plugins.VERBS)


def plugin_verbs() -> dict[str, EntryPoint]:
    """Return the verbs of other distributions by name: those of the studies, then the others. None is imported."""
    usable = {point.name: point for point in reversed(installed_plugins()) if not is_taken(point)}
    names = (*(name for name in STUDIES if name in usable), *sorted(usable.keys() - set(STUDIES)))
    return {name: usable[name] for name in names}


def is_taken(point: EntryPoint) -> bool:
    """Whether a verb of fedvitals, or of its studies, has the name of this plug-in."""
    from fedvitals import plugins

    of_studies = plugins.distribution_of(point) == STUDIES_DISTRIBUTION
    return point.name in VERBS or (point.name in STUDIES and not of_studies)


def load_plugin(name: str) -> click.Command:
    """Import the verb of another distribution; a name that nobody offers is a UsageError that lists the known ones."""
    point = plugin_verbs().get(name)
    if point is not None:
        from fedvitals import plugins

        command: click.Command = plugins.load(
            point, "verb", lambda plugin: isinstance(plugin, click.Command), "a click command"
        )
        return command
    if name in STUDIES:
        raise click.UsageError(
            f"'{name}' comes with the distribution {STUDIES_DISTRIBUTION}, which is not on PyPI yet: "
            "`pip install -e studies` in a clone of the repository."
        )
    raise click.UsageError(unknown("verb", name, [*VERBS, *plugin_verbs()]))


def plugins_left_out() -> list[str]:
    """Return a sentence for each plug-in that adds no verb: its name is taken, or it cannot be loaded."""
    from fedvitals import plugins

    reasons = [
        f"The verb '{point.name}' of {plugins.distribution_of(point)} has the name of a verb of fedvitals."
        for point in installed_plugins()
        if is_taken(point)
    ]
    for name in plugin_verbs():
        try:
            load_plugin(name)
        except PluginError as error:
            reasons.append(str(error))
    return reasons


@click.command(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="The store is runs.db in this folder or what FEDVITALS_STORE names; verbs that read runs take --store.",
)
@click.version_option(__version__, message="fedvitals %(version)s")
def app() -> None:
    """Observability for federated learning: find out which client, layer and round is faulty, and why."""


def _harmless(text: str) -> str:
    """Return an error for a terminal: its names come from stores, and no control character may move the cursor."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def _damage_behind(arguments: list[str]) -> str | None:
    """Return what the doctor finds wrong with the store that a verb read, if that explains why it failed."""
    from fedvitals.store import store_target
    from fedvitals.store.upkeep.doctor import damage_in

    named = [value for word, value in itertools.pairwise(arguments) if word == "--store"]
    named += [word.removeprefix("--store=") for word in arguments if word.startswith("--store=")]
    try:
        return damage_in(store_target(named[-1] if named else None))
    except FedvitalsError:
        return None


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
    except ClosedOutputError:
        # Not an error. Nothing more may be written, not even at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        damage = _damage_behind(sys.argv[1:] if arguments is None else arguments)
        if damage is None:
            raise
        click.echo(f"fedvitals: {_harmless(damage)} ({type(error).__name__} while reading)", err=True)
        sys.exit(2)
