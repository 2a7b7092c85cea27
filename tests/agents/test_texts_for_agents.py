# SPDX-License-Identifier: Apache-2.0
"""`llms.txt` and the skill name only pages, verbs and options that there are."""

import re

import click

from fedvitals.cli.main import VERBS, app
from support.paths import ROOT

LLMS, SKILL = ROOT / "llms.txt", ROOT / "skills/fedvitals/SKILL.md"


def test_pages_that_llms_txt_links_are_there():
    links = re.findall(r"\]\(([^)]+)\)", LLMS.read_text(encoding="utf-8"))
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).is_file()] == []
    assert LLMS.read_text(encoding="utf-8").startswith("# fedvitals\n\n> ")


def test_the_skill_calls_verbs_and_options_that_there_are():
    text = SKILL.read_text(encoding="utf-8")
    assert re.match(r"---\nname: fedvitals\ndescription: .{50,1000}\n---\n", text)
    calls = re.findall(r"`fedvitals (\w+)([^`]*)`", text)
    assert len(calls) > 6
    for verb, rest in calls:
        command = app.get_command(click.Context(app), verb)
        assert verb in VERBS
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in rest.split() if word.startswith("--")} <= known, verb
