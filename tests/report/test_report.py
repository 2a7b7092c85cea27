# SPDX-License-Identifier: Apache-2.0
"""The report: one file with the whole story, in which every name is text and nothing has to be fetched."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("matplotlib", reason="the report's pictures are drawn with matplotlib")

from fedvitals.errors import ConfigError
from fedvitals.records import Layer, LayerTable, Run
from fedvitals.report import pdf
from fedvitals.report.markup import Card, Code, Facts, Heading, Points, Table, Text, literal, markdown, page, words_of
from fedvitals.report.settings import settings_part
from fedvitals.report.write import default_name, report
from fedvitals.store import open_reader
from support import plotted_runs as pictured
from support.conditions import holds_for_each
from support.verbs import result, run

pytestmark = pytest.mark.thorough  # each page is a dozen pictures

SECTIONS = ("What happened", "Evidence", "What to do", "Appendix")
FOLDED = (
    "Vital signs", "Clients", "Layers and gradients", "Time, memory and bytes", "Configuration and versions",
    "How sure, and what was not measured",
)  # fmt: skip
VOID = ("meta", "br", "use", "path", "rect", "image", "line", "polygon")


@pytest.fixture(scope="session")
def store(session_folder):
    return pictured.write(session_folder / "reported.db")


@pytest.fixture(scope="session")
def pages(store, session_folder):
    """The report on each run, and the comparison, as HTML."""
    found = {}
    with open_reader(store) as reader:
        for runs in ([pictured.FULL], [pictured.HOSTILE], [pictured.EMPTY], [pictured.FULL, pictured.HOSTILE]):
            file = session_folder / f"{'-'.join(runs)}.html"
            report(reader, runs, file)
            found["+".join(runs)] = file.read_text(encoding="utf-8")
    return found


class Page(HTMLParser):
    """Checks that every tag is closed in order; collects what would be fetched, what could run, ids and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.fetched, self.tags, self.ids, self.handlers, self.words = [], [], [], [], [], []
        self.feed(text)
        assert not self.open

    def _seen(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in {"src", "href", "xlink:href", "action", "data", "poster", "srcset"}:
                self.fetched.append(value or "")
            if name == "id":
                self.ids.append(value)
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_starttag(self, tag, attributes):
        self._seen(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self._seen(tag, attributes)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


RUNS = (pictured.FULL, pictured.HOSTILE, pictured.EMPTY, f"{pictured.FULL}+{pictured.HOSTILE}")


@pytest.mark.parametrize("which", RUNS)
def test_a_page_needs_nothing_else_and_runs_nothing(which, pages):
    found = Page(pages[which])
    assert not {"script", "iframe", "object", "embed", "link", "base", "form", "img"} & set(found.tags)
    assert not found.handlers
    assert holds_for_each(re.match(r"#|data:image/png;base64,", target) for target in found.fetched)
    assert holds_for_each(
        f'"{target}"' in pages[which] for target in found.fetched
    )  # each stands in quotes, with nothing escaped
    inside = [target[1:] for target in found.fetched if target.startswith("#")]
    assert set(inside) <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))  # pictures do not share theirs
    head = pages[which][: pages[which].index("<body>")]
    assert "default-src 'none'" in head
    assert "script-src" not in head
    assert "url(" not in head


def test_the_story_has_all_its_parts(pages):
    found = pages[pictured.FULL]
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", found)
    assert titles == list(SECTIONS)
    appendix = found[found.index('id="appendix"') :]
    assert tuple(re.findall(r"<details><summary><h3[^>]*>(.*?)</h3></summary>", appendix)) == FOLDED
    assert found.index('id="appendix"') > found.index("<svg")
    own = re.sub(r"<(style|svg|details).*?</\1>|<[^>]+>", " ", found[: -len(appendix)], flags=re.DOTALL)
    assert len(own.split()) < 500  # three findings, on a page or two
    assert found.count("<svg") >= 14
    assert "could not be drawn" not in found
    words = " ".join(Page(found).words)
    assert "c7 seems to have wrong labels" in words  # the verdict
    for part in (
        "Likely causes",
        "What would prove it wrong",
        "Privacy level",
        "Records lost",
        "Not measured",
        "Settings",
    ):
        assert part in words


def test_hostile_names_are_text(pages):
    for which in (pictured.HOSTILE, RUNS[-1]):
        found = Page(pages[which])
        words = "".join(found.words)
        assert pictured.NASTY in words
        assert r"$\frac{" in words
        assert pictured.MARKED in words  # neither strong, nor code, nor a link, nor a break
        assert "\\<" not in words  # our own escapes are not shown
        assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\u202e]", pages[which])
        assert "could not be drawn" not in words
        assert "http://evil.example" not in "".join(found.fetched)


def test_an_empty_run_says_what_is_missing(pages):
    words = " ".join(Page(pages[pictured.EMPTY]).words)
    for part in ("Not judged", "No client was seen", "No round was timed", "Neither accuracy nor loss was measured"):
        assert part in words


def test_several_runs_are_compared(pages):
    words = " ".join(Page(pages[RUNS[-1]]).words)
    for part in ("A (synthetic)", "One run each", "Where they diverge", "settings that differ", "Appendix"):
        assert part in words
    order = [
        words.rindex(part) for part in ("What happened", "Where they diverge", "Evidence", "What to do", "Appendix")
    ]
    assert order == sorted(order)


def test_settings_are_flat_paths_and_readable_values():
    layers = (Layer("0.weight", (3, 2), "float32"), Layer("0.bias", (3,), "float32"))
    one, two = (
        Run(name, "x", config={"opt": {"lr": rate}, "faults": [{"kind": "crash", "nodes": ["c1", "c2"]}], "on": True},
            tables=(LayerTable("parameter", layers[:count]),))
        for name, rate, count in (("r1", 0.1, 1), ("r2", 0.2, 2))
    )  # fmt: skip
    differing, same = settings_part([[one], [two]], ["A", "B"])
    changed = {row[0]: row[1:] for row in differing.rows}
    assert changed == {
        "opt.lr": ("0.1", "0.2"),
        "model": ("1 layers, 6 weights", "2 layers, 9 weights"),
        "model.0.bias": ("–", "3"),
    }
    kept = dict(same.blocks[0].rows)
    assert kept["faults.0.nodes"] == "c1, c2"
    assert kept["on"] == "yes"
    assert not any(mark in text for text in [*kept.values(), *map(str, changed)] for mark in "{}[]")


@pytest.mark.browser
@pytest.mark.parametrize("page", [{"viewport": {"width": 390, "height": 800}}], indirect=True, ids=["phone"])
def test_on_a_telephone_pictures_scroll_in_their_own_box(pages, page, tmp_path):
    (tmp_path / "x.html").write_text(pages[pictured.FULL], encoding="utf-8")
    page.goto((tmp_path / "x.html").as_uri())
    widths = page.evaluate("[...document.querySelectorAll('figure svg')].map((one) => one.clientWidth)")
    assert min(widths) >= 640
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_same_run_gives_the_same_bytes(store, pages, tmp_path):
    with open_reader(store) as reader:
        written = report(reader, [pictured.FULL], tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == pages[pictured.FULL]
    assert written.bytes == len(pages[pictured.FULL].encode())
    assert written.bytes < 600_000


def test_markdown_has_its_pictures_beside_it(store, tmp_path):
    with open_reader(store) as reader:
        written = report(reader, [pictured.HOSTILE], tmp_path / "story.md")
    text = (tmp_path / "story.md").read_text(encoding="utf-8")
    linked = re.findall(r"!\[[^\n]*\]\((story_files/[\w-]+\.svg)\)", text)
    assert sorted(linked) == sorted(str(Path(file).relative_to(tmp_path)) for file in written.pictures)
    for file in written.pictures:
        ET.parse(file)
    prose = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", text)  # what is fenced is shown as it is
    assert not re.search(r"(?<!\\)<", prose)
    assert not re.search(r"(?<![\\!])\[c", prose)
    assert "\n# " in f"\n{text}"
    for title in SECTIONS:
        assert f"\n## {title}\n" in text
    for title in FOLDED:
        assert f"\n### {title}\n" in text


def test_the_verb_writes_and_says_so(store, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "report", pictured.FULL, "--store", store)
    assert code == 0
    assert out.startswith("synthetic-report.html  ")
    assert "Problem: c7 seems" in out
    told = result(capsys, "report", pictured.FULL, pictured.HOSTILE, "-o", tmp_path / "two.html", "--store", store)
    assert told["runs"] == [pictured.FULL, pictured.HOSTILE]
    assert told["bytes"] == (tmp_path / "two.html").stat().st_size
    assert run(capsys, "report", pictured.FULL, "--store", store)[0] == 0  # over its own report


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("notes.html", "--force"),
        ("x.txt", "A report is a file"),
        ("no/where.html", "no such folder"),
        ("d.html", "a folder"),
    ],
)
def test_what_is_no_report_is_not_written_over(name, words, store, tmp_path, capsys):
    (tmp_path / "notes.html").write_text("<p>mine</p>")
    (tmp_path / "d.html").mkdir()
    code, _, error = run(capsys, "report", pictured.EMPTY, "-o", tmp_path / name, "--store", store)
    assert code == 2
    assert words in error
    assert (tmp_path / "notes.html").read_text() == "<p>mine</p>"


def test_nor_is_a_picture_of_somebody_elses_beside_it(store, tmp_path):
    """Pictures get the check that the page gets, and before anything is written."""
    with open_reader(store) as reader:
        written = report(reader, [pictured.HOSTILE], tmp_path / "story.md")
        report(reader, [pictured.HOSTILE], tmp_path / "story.md")  # our own may be written over
        Path(written.pictures[-1]).write_text("<svg>mine</svg>")
        (tmp_path / "story.md").unlink()
        with pytest.raises(ConfigError, match="not a report of ours"):
            report(reader, [pictured.HOSTILE], tmp_path / "story.md")
        assert not (tmp_path / "story.md").exists()
        report(reader, [pictured.HOSTILE], tmp_path / "story.md", force=True)
    assert "mine" not in Path(written.pictures[-1]).read_text(encoding="utf-8")


def test_force_writes_over_a_file(store, tmp_path, capsys):
    (tmp_path / "notes.html").write_text("<p>mine</p>")
    arguments = ("report", pictured.EMPTY, "--store", store, "--force", "-o")
    assert run(capsys, *arguments, tmp_path / "notes.html")[0] == 0
    assert "fedvitals" in (tmp_path / "notes.html").read_text(encoding="utf-8")
    (tmp_path / "store.html").write_bytes(Path(store).read_bytes())  # but never a store
    code, _, error = run(capsys, *arguments, tmp_path / "store.html")
    assert (code, "is a store" in error) == (2, True)


def test_an_unknown_run_is_answered_with_those_there_are(store, tmp_path, capsys):
    code, _, error = run(capsys, "report", "nobody", "-o", tmp_path / "x.html", "--store", store)
    assert code == 2
    assert "Unknown run 'nobody'" in error
    assert not (tmp_path / "x.html").exists()


def test_a_files_name_is_made_of_plain_letters():
    assert default_name("../../etc/<passwd>", ["r1"]) == "etc-passwd-report.html"
    assert default_name("日本", ["r1", "r2"]) == "r1-comparison.html"


@pytest.mark.browser
@pytest.mark.skipif(pdf.browser() is None, reason="no Chromium on this machine (Debian: apt install chromium)")
def test_a_pdf_is_printed(store, tmp_path):
    with open_reader(store) as reader:
        for _ in range(2):  # the second time over its own
            report(reader, [pictured.FULL], tmp_path / "x.pdf")
    data = (tmp_path / "x.pdf").read_bytes()
    assert data.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", data)) > 1


def test_without_a_browser_the_error_says_what_to_install(store, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVITALS_CHROMIUM", "no-such-program")
    with open_reader(store) as reader, pytest.raises(ConfigError, match=r"apt install chromium.*HTML"):
        report(reader, [pictured.EMPTY], tmp_path / "x.pdf")
    assert not (tmp_path / "x.pdf").exists()


def test_a_browser_that_fails_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVITALS_CHROMIUM", "false")
    with pytest.raises(ConfigError, match=r"printed no page"):
        pdf.pdf_of("<p>x</p>")


WITHOUT = """
import sys
sys.modules["matplotlib"] = None
from fedvitals.cli.main import main
main(["report", "synthetic", "--store", sys.argv[1], "-o", sys.argv[2]])
"""


def test_without_matplotlib_the_error_names_the_extra(store, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, store, tmp_path / "x.html"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pip install 'fedvitals[plots]'" in done.stderr
    assert not (tmp_path / "x.html").exists()


NASTY_TEXTS = (
    pictured.NASTY, pictured.MARKED, pictured.MATHS, "- a list", "1. one", "# head", "> quote", "a | b", "\\", "\\|",
    "`", "**", "*a*", "``` fence", "<!-- x -->", "~~x~~", "![x](http://evil.example/x.png)", "trailing\\",
)  # fmt: skip


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_a_literal_is_itself_wherever_it_stands(text):
    """In a heading, a paragraph, a point, a cell and a fact, as HTML: letter for letter."""
    said = literal(text)
    blocks = [
        Heading(2, said), Text(said), Points((said,)), Table(said, (said,), ((said,),), said), Facts(((said, said),)),
        Card("note", (Text(f"**{said}**"),)), Code((text,)),
    ]  # fmt: skip
    words = Page(page(blocks, text)).words
    assert sum(word == text for word in words) >= 11
    assert words_of(said) == text
    assert not re.search(r"(?<!\\)(?:\\\\)*<", re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", markdown(blocks)))
