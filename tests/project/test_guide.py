# SPDX-License-Identifier: Apache-2.0
"""The walk-throughs work as they are written: every block runs, every picture is one that was drawn."""

import importlib.util
import itertools
import re
import sys
from pathlib import Path

import pytest

from documentation.code_blocks import COMMANDS, OUTPUT, blocks_of
from support.paths import ROOT

pytestmark = pytest.mark.thorough  # each trains for seconds

for package in ("matplotlib", "sklearn"):
    pytest.importorskip(package, reason="the guides need the extras lab and plots")

GUIDE = ROOT / "docs" / "guide"
_spec = importlib.util.spec_from_file_location("guide_make", GUIDE / "make.py")
make = importlib.util.module_from_spec(_spec)
sys.modules["guide_make"] = make  # dataclasses look their module up
_spec.loader.exec_module(make)


# Numbers (but for that of the detectors), units of time, and bars: they differ from one run or machine to the next.
CHANGING = re.compile(r"[−-]?\d\S*+(?! detectors)|\b(?:s|ms)\b|[▁-█]+|\b[DUC]{3,}|·{3,}|×")


def words_of(output):
    return CHANGING.sub(" ", output).split()


def check_outputs(guide, printed_by):
    """Outputs on the page are those of the commands before them: as a whole, or where the page says that something was
    left out, by the words that occur.
    """
    text, blocks = guide.read_text(encoding="utf-8"), blocks_of(guide)
    for command, shown in itertools.pairwise(blocks):
        if command.language in COMMANDS and shown.language in OUTPUT:
            printed = words_of("\n".join(printed_by[line] for line in command.commands))
            after = text.partition(shown.code)[2].removeprefix("```").lstrip()
            if after.startswith("(") and "left out" in after.partition(")")[0]:
                assert set(words_of(shown.code)) <= set(printed), shown.place
            else:
                assert words_of(shown.code) == printed, shown.place


def test_every_guide_is_in_the_list():
    pages = {path.stem for path in GUIDE.glob("*.md")} - {"README"}
    assert pages == set(make.GUIDES)
    index = (GUIDE / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.md)" in index for name in make.GUIDES)


@pytest.mark.parametrize("name", make.GUIDES)
def test_a_guide_works_as_written(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDVITALS_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "160")  # so that tables cut no names short
    text = (GUIDE / f"{name}.md").read_text(encoding="utf-8")
    played = make.play(GUIDE / f"{name}.md")
    assert played.codes
    for line, code in played.codes.items():
        assert code in ((0, 1) if line.startswith("fedvitals findings") else (0,)), line
        assert played.said[line].strip(), line
    check_outputs(GUIDE / f"{name}.md", played.said)
    assert list(played.pictures) == re.findall(r"\(figures/([\w-]+)\.svg\)", text)
    for picture, svg in played.pictures.items():
        assert "<svg" in svg
        drawn = GUIDE / "figures" / f"{picture}.svg"
        assert drawn.stat().st_size < 150_000, f"draw it: python docs/guide/make.py {name}"
        stale = f"{picture} is not drawn so any more: run python docs/guide/make.py {name} and look at it"
        assert make.look_of(svg) == make.look_of(drawn.read_text(encoding="utf-8")), stale
    taken = set(re.findall(r'"([\w-]+)": \("', (GUIDE / "screenshots.py").read_text(encoding="utf-8")))
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        if link.endswith(".png"):  # a page of the dashboard, taken by screenshots.py
            assert Path(link).stem in taken, link
        else:
            assert (GUIDE / link).exists(), link
    assert "fedvitals.views" not in text  # only what is public
    assert "fedvitals.store" not in text
