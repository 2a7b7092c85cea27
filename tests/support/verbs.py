# SPDX-License-Identifier: Apache-2.0
"""Calling a verb as the command line does."""

import json

import pytest

from fedvitals.cli.main import main


def verbs_of(help_text: str) -> list[str]:
    """The verbs that `--help` lists, in order."""
    listed = help_text.split("Commands:\n")[1].split("\n\n", maxsplit=1)[0]
    return [line.split()[0] for line in listed.splitlines()]


def run(capsys, *arguments):
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return done.value.code, captured.out, captured.err


def result(capsys, *arguments):
    """What a verb gives as JSON, in its one shape."""
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    shape = json.loads(out)
    assert set(shape) == {"fedvitals", "verb", "result"}
    assert shape["verb"] == arguments[0]
    return shape["result"]
