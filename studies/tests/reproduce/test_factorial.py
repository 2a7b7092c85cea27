# SPDX-License-Identifier: Apache-2.0
"""The factorial: its cells, its score, what follows from it, and its part of the page; on invented results."""

import pytest

from fedvitals_studies.reproduce import factorial, factorial_page
from fedvitals_studies.reproduce.claims import read, verdict_of
from fedvitals_studies.reproduce.conditions import BY_NAME, FACTORIAL, OURS, READINGS, Reading, quick_factorial
from fedvitals_studies.reproduce.page import write_page
from fedvitals_studies.reproduce.parallel import SECONDS, seconds_of, shares
from fedvitals_studies.reproduce.results import KNOWN_GTSRB, Results, save
from fedvitals_studies.reproduce.study import Job
from support import invented_results as invented

CELLS = [condition for condition in FACTORIAL if condition.study == "factorial"]
BEST = Reading(pool=False, scale_pixels=False, keep_optimizer=True)


def run_of(condition, repeat, *, as_the_paper=True):
    """As the paper tells it, or calm: no falls, no jumps."""
    run = {**invented.measure(condition, repeat), "dataset": "gtsrb", "digest": KNOWN_GTSRB[0]}
    if not as_the_paper:
        run["series"]["aggregated.accuracy"] = [0.5 + 0.01 * number for number in range(condition.rounds)]
        for name in ("start.test_loss", "iteration.test_loss"):
            parts = run["series"].get(name, {})
            run["series"][name] = {edge: [1.0] * len(values) for edge, values in parts.items()}
    return run


def results_of(repeats, conditions=CELLS):
    return [
        run_of(condition, repeat, as_the_paper=condition.name.startswith(BEST.condition_of("")))
        for condition in conditions
        for repeat in range(repeats)
    ]


@pytest.fixture(scope="module")
def whole():
    return Results(results_of(factorial.REPEATS))


def test_the_cells_are_all_combinations_of_what_the_paper_leaves_open():
    assert len(CELLS) == 64
    read = {(c.clip, c.topology, c.pool, c.scale_pixels, c.keep_optimizer) for c in CELLS}
    assert len(read) == 64
    assert {(c.clients, c.rounds, c.iterations, c.batches, c.scenario) for c in CELLS} == {(100, 25, 20, 1, "baseline")}
    epochs = [c for c in FACTORIAL if c.study == "epochs"]
    assert (len(epochs), {c.batches for c in epochs}) == (64, {20})
    assert {c.every_iteration for c in CELLS if c.topology == "hierarchical"} == {True}


def test_processes_that_share_a_gpu_have_each_cell_once_and_as_much_to_do():
    """Also when some cells are nearly done: unpooled runs and those that measure every iteration take far longer."""
    left = [Job(cell, repeat) for cell in CELLS for repeat in range(1 if cell.topology == "clustered" else 5)]
    dealt = shares(left)
    assert len(dealt) == 8
    assert sorted(name for names in dealt.values() for name in names) == sorted(cell.name for cell in CELLS)
    expected = [
        sum(
            SECONDS[job.condition.pool != "none", job.condition.every_iteration]
            for job in left
            if job.condition.name in n
        )
        for n in dealt.values()
    ]
    assert max(expected) < 1.35 * min(expected)
    assert [*shares([Job(CELLS[0], 4)]).values()] == [(CELLS[0].name,)]
    epoch, extended = (next(c for c in FACTORIAL if c.study == study) for study in ("epochs", "likeliest"))
    assert (seconds_of(epoch), seconds_of(extended)) == (20 * seconds_of(CELLS[0]), 2 * seconds_of(CELLS[0]))


def test_the_reading_that_shows_what_the_paper_saw_is_the_likeliest(whole):
    ranked = factorial.standings(whole)
    assert ranked[0].reading == BEST
    assert len(ranked) == 8  # epochs have not been run
    assert ranked[0].score > 0.8
    assert ranked[1].score < 0.5
    assert factorial.likeliest(whole) == BEST
    calm = {verdict.claim.id: verdict.verdict for verdict in ranked[-1].verdicts}
    assert calm["2.1"] == "not testable"  # which gives no point: the paper saw something
    assert ranked[0].repeats == factorial.REPEATS


def test_before_every_cell_is_complete_nothing_is_the_likeliest(whole):
    fewer = Results([run for run in whole.all() if run["repeat"] < factorial.REPEATS - 1])
    assert factorial.likeliest(fewer) is None
    assert factorial.standings(fewer)[0].reading == BEST
    words = " ".join(block.text for block in factorial_page.blocks(fewer) if hasattr(block, "text"))
    assert "256 of 320 runs, 64 of 64 cells" in words
    assert "No reading is called the likeliest" in words
    missing = Results([run for run in whole.all() if "nopool-raw-kept-initial-rings" not in run["condition"]])
    assert BEST not in [standing.reading for standing in factorial.standings(missing)]


def test_between_equal_scores_more_single_checks_decide_then_the_order():
    def standing(reading, score, held):
        return factorial.ReadingScore(reading, (), 5, score, held)

    first, second, third = READINGS[:3]
    ranked = sorted(
        [standing(second, 0.5, 0.4), standing(first, 0.5, 0.4), standing(third, 0.5, 0.6)], key=lambda s: s.order
    )
    assert [s.reading for s in ranked] == [third, first, second]


def test_the_page_names_the_likeliest_and_what_changes_under_it(whole):
    shown = factorial_page.blocks(whole)
    assert any("The likeliest setting: no pooling, pixels 0 to 255, Adam kept" in getattr(b, "text", "") for b in shown)
    (changes,) = [block for block in shown if getattr(block, "title", "") == "Verdicts that change"]
    assert ("1.3", "not reproduced", "reproduced") in [(row[0], *row[2:]) for row in changes.rows]


def test_our_cells_stand_for_the_papers_conditions(whole):
    ours = factorial.with_our_cells(whole)
    assert ours.repeats("initial-rings-clipped") == tuple(range(factorial.REPEATS))
    own = OURS.condition_of("initial-rings-clipped")
    assert ours.of("initial-rings-clipped")[0]["series"] == whole.of(own)[0]["series"]


def test_a_repeat_keeps_what_only_the_papers_condition_measured(whole):
    """The cell has the losses on the local tests, the paper's condition another series: both are the same training."""
    name = "initial-hierarchical-unclipped"
    before = [run_of(BY_NAME[name], repeat) for repeat in range(2)]
    for run in before:
        del run["series"]["iteration.test_loss"], run["series"]["start.test_loss"]
        run["series"]["scale.gsc_whole"] = run["series"]["scale.gsc"]
    cell = [run for run in whole.all() if run["condition"] == OURS.condition_of(name) and not run["repeat"]]
    joined = factorial.with_our_cells(Results([*before, *cell]))
    assert joined.repeats(name) == joined.repeats(name, "scale.gsc_whole") == (0, 1)
    assert joined.repeats(name, "iteration.test_loss") == (0,)
    (claim,) = [claim for claim in read()[0] if claim.id == "1.7"]
    judged = verdict_of(claim, Results([*joined.all(), run_of(BY_NAME["initial-hierarchical-clipped"], 0)]))
    assert judged.verdict != "not run"
    assert judged.repeats == 1


@pytest.mark.thorough
def test_the_page_is_about_the_likeliest_reading_once_its_extended_study_is_there(whole, tmp_path):
    assert factorial.main_results(whole)[1] == OURS
    extended = results_of(1, [*factorial.extended_of(BEST), *factorial.extended_of(OURS)])
    main, reading = factorial.main_results(Results([*whole.all(), *extended]))
    assert reading == BEST
    name = "initial-hierarchical-unclipped"
    assert main.of(name)[0]["series"] == whole.of(BEST.condition_of(name))[0]["series"]
    outcome = write_page(tmp_path, Results([*whole.all(), *extended]))
    words = {verdict.claim.id: verdict.verdict for verdict in outcome.verdicts}
    ours = {verdict.claim.id: verdict.verdict for verdict in outcome.ours}
    assert (words["1.3"], ours["1.3"]) == ("reproduced", "not")
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "reading of it: no pooling, pixels 0 to 255, Adam kept, with our own choices beside it" in page
    assert "| with our choices |" in page
    assert page.index("Which sentences of the paper hold") < page.index("## Every sentence of the paper")
    depends = next(line for line in page.splitlines() if line.startswith("- 1.3: "))
    assert "not reproduced with pooling, pixels ÷ 255, Adam fresh each round" in depends


def test_what_is_run_next_depends_on_what_was_seen(tmp_path):
    def small(condition):
        return quick_factorial(condition, "gtsrb")

    first = [*factorial.phases(tmp_path, small)]
    assert [(len(conditions), repeats) for conditions, repeats in first] == [(6, 3), (64, 5)]
    for run in results_of(factorial.REPEATS, [small(cell) for cell in CELLS]):
        save(tmp_path, run, small(BY_NAME[run["condition"]]))
    after = [*factorial.phases(tmp_path, small)]
    assert [(len(conditions), repeats) for conditions, repeats in after] == [(6, 3), (64, 5), (12, 3), (8, 2), (6, 3)]
    best = factorial.likeliest(Results.read(tmp_path, [small(condition) for condition in FACTORIAL]))
    assert {condition.batches for condition in after[3][0]} == {20}
    assert all(condition.name.startswith(best.condition_of("extended")) for condition in after[4][0])
    assert {*after[2][0]} == {*after[4][0], *map(small, factorial.extended_of(OURS))}
    fewer = [repeats for _, repeats in factorial.phases(tmp_path, small, 1)]
    assert fewer == [1] * 5
