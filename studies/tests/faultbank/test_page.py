# SPDX-License-Identifier: Apache-2.0
"""The fault bank's page, drawn from invented outcomes by the real code."""

import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from fedvitals_studies.faultbank.intervals import NOTHING, Estimate
from fedvitals_studies.faultbank.page import words, write_page
from fedvitals_studies.faultbank.report import summarise
from fedvitals_studies.faultbank.score import Alarm, Outcome, Planted

KINDS = {"label_noise": "LABEL_NOISE", "label_flip": "LABEL_FLIP", "sign_flip": "BYZANTINE", "straggler": "STRAGGLER"}
NODES = [f"c{number}" for number in range(10)]


def invented(number, kind=None):
    """A run in which our method mostly hits and the baseline accuses at random."""
    chance = random.Random(number)
    rounds = chance.choice((12, 20))
    faults, ours = [], []
    if kind is not None:
        family = "system" if kind == "straggler" else "client"
        faults = [Planted(kind, KINDS[kind], family, "clients", ["c3"], 2, None, chance.choice((0.4, 1.0)), 0.2)]
        if chance.random() < 0.9:
            named = KINDS[kind] if chance.random() < 0.9 else "INPUT_NOISE"
            view = chance.choice(("server", "telemetry"))
            causes = [(named, 0.8)]
            ours = [Alarm(at, named, "c3", None, 0.9, "warning", view, causes) for at in range(3, rounds)]
    elif chance.random() < 0.1:
        ours = [Alarm(4, "BYZANTINE", "c0", None, 0.6, "warning")]
    plain = [Alarm(at, "UNUSUAL_CLIENT", chance.choice(NODES), None, 0.5, "warning") for at in range(rounds)]
    return Outcome(
        case=f"case-{number}", bank="held-out", domain=chance.choice(("gtsrb-cnn", "fashion <b>mlp")),
        dataset="synthetic", model="mlp", topology="centralized", partition=chance.choice(("iid", "dirichlet 0.3")),
        clients=10, participation=1.0, rounds=rounds, faults=faults, lying=False, accuracy=[0.8] * rounds,
        damage=chance.choice((0.1, 0.7, 3.0, 20.0)) if kind else None,
        present={node: list(range(rounds)) for node in NODES}, groups={}, seconds_rounds=2.0,
        methods={"fedvitals": ours, "z-score": plain},
        scores={"fedvitals": {node: float(node == "c3") for node in NODES}} if kind else {},
        probabilities=[(chance.random(), chance.random() < 0.5) for _ in range(5)], seconds_detectors=0.004,
    )  # fmt: skip


@pytest.fixture(scope="module")
def outcomes():
    faulty = [invented(number, kind) for number, kind in enumerate([*KINDS] * 6)]
    lied = [replace(run, case=f"{run.case}/lying", lying=True) for run in faulty[::3]]
    return [*faulty, *lied, *(invented(100 + n) for n in range(24))]


@pytest.fixture(scope="module")
def folder(outcomes, tmp_path_factory):
    place = tmp_path_factory.mktemp("bank") / "page"
    files = write_page(summarise(outcomes), outcomes, place)
    assert [file.name for file in files] == ["index.html", "README.md", "summary.json"]
    return place


class Tags(HTMLParser):
    """Every opened tag is closed, in order."""

    VOID = frozenset({"meta", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.sources = [], []

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in {"src", "href"} and not value.startswith("#")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_one_file_that_needs_nothing_else(folder):
    text = (folder / "index.html").read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert not tags.sources
    assert "<script" not in text
    assert "fashion &lt;b&gt;mlp" in text
    assert "<b>mlp" not in text


def test_every_section_is_on_the_page_and_in_the_markdown(folder):
    text = (folder / "README.md").read_text(encoding="utf-8")
    for wanted in (
        "The bars",
        "Methods side by side",
        "By fault kind",
        "By issue",
        "False alarms by rule",
        "Label faults",
    ):
        assert f"## {wanted}" in text
    assert "| z-score |" in text
    assert "| straggler |" in text
    assert re.search(r"\| label_noise, trained \|", text)
    rows = [line for line in text.splitlines() if line.startswith("| detection F1")]
    assert len(rows) == 1
    assert re.search(r"0\.\d+ \[0\.\d+, \d(\.\d+)?\]", rows[0])
    for file in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (folder / file).exists()


@pytest.mark.parametrize("name", ["causes", "delays", "reliability"])
def test_a_picture_is_whole_and_small(folder, name):
    text = (folder / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    assert ET.fromstring(text).tag.endswith("svg")
    assert len(text) < 60_000
    assert "nan" not in text


def test_the_numbers_can_be_read_by_a_program(folder):
    facts = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert facts["counts"]["runs"] == 48
    assert {bar["verdict"] for bar in facts["bars"]} <= {"met", "missed", "not measured"}
    assert [row["name"] for row in facts["methods"]] == ["fedvitals", "z-score"]
    ours, theirs = (row["figures"]["culprit_f1"]["value"] for row in facts["methods"])
    assert ours > 0.7 > theirs
    assert facts["methods"][0]["figures"]["f1"]["low"] < facts["methods"][0]["figures"]["f1"]["value"]
    assert sum(map(sum, facts["confusion"]["counts"])) == sum(
        row["figures"]["cause"]["count"] for row in facts["kinds"] if row["figures"]["cause"]["value"] is not None
    )
    assert len(facts["reliability"]) >= 10


def test_the_same_outcomes_give_the_same_bytes(outcomes, folder, tmp_path):
    files = [*write_page(summarise(outcomes), outcomes, tmp_path)]
    assert files
    for file in files:
        assert file.read_bytes() == (folder / file.name).read_bytes()


def test_a_page_of_clean_runs_alone_says_what_is_not_measured(outcomes, tmp_path):
    clean = [outcome for outcome in outcomes if outcome.clean]
    write_page(summarise(clean), clean, tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "not measured" in text
    assert "| – | – not measured |" in text


def test_figures_in_words():
    assert words(NOTHING) == "–"
    assert words(Estimate(0.9123, 0.871, 0.95149, 336)) == "0.912 [0.871, 0.951]"
    assert words(Estimate(0.9123, 0.871, 0.95149, 336), percent=True) == "91.2 % [87.1, 95.1]"
    assert words(Estimate(float("inf"), 2, float("inf"), 3)) == "∞ [2, ∞]"
    assert words(Estimate(5210, None, None, 3)) == "5210"
