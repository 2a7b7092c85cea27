# SPDX-License-Identifier: Apache-2.0
"""What the language-model rows measure, on tiny models and without a GPU."""

import pytest
import torch

from fedvitals_studies.bench.gpt import GPT, with_adapters
from fedvitals_studies.bench.gpu.llm import CASES, Case, llm_rows, monitors
from fedvitals_studies.bench.other_watchers import BINS, CockpitHooks
from fedvitals_studies.bench.overhead import _judged, language_model_rows
from fedvitals_studies.bench.plain_loop import Loop, Size, Spent, percent_over, row_of

TINY = Size(clients=2, steps=2, batch=2, tokens=8, vocabulary=32)


def tiny() -> GPT:
    return GPT(16, 2, 2, vocabulary=32)


@pytest.mark.thorough
def test_a_row_for_each_preset_and_for_those_beside_us():
    case = Case("GPT", tiny, TINY, ("light", "standard"), autocast=False, others=True)
    rows = llm_rows(quick=True, tell=lambda _: None, cases=[case], device="cpu")
    unwatched, light, standard, hooks, wandb = (row["what"].rsplit(", ", 1)[-1] for row in rows)
    assert (unwatched, light, standard, hooks, wandb) == (
        "unwatched", "light", "standard", "hooks like Cockpit's", "offline",
    )  # fmt: skip
    assert [row["bar"] for row in rows] == ["", "≤ 2 %", "≤ 4 %", "", ""]
    assert rows[1]["low"] <= rows[1]["percent"] <= rows[1]["high"]
    assert rows[-1]["measured"].startswith("not measured: No module named 'wandb'") or "percent" in rows[-1]


@pytest.mark.parametrize("watcher", ["monitor", "hooks"])
def test_every_watcher_leaves_the_same_bits(watcher):
    weights = []
    for watched in (False, True):
        torch.manual_seed(0)
        loop = Loop(with_adapters(tiny()), TINY, "cpu", autocast=False)
        with monitors(["standard"]) as own:
            chosen = own["standard"] if watcher == "monitor" else CockpitHooks()
            for number in range(2):
                loop.block([number], chosen if watched else None)
        weights.append(torch.cat([p.detach().flatten() for p in loop.model.parameters()]))
    assert torch.equal(*weights)


def test_hooks_measure_each_trained_parameter_at_each_step_and_leave():
    loop, hooks = Loop(with_adapters(tiny()), TINY, "cpu", autocast=False), CockpitHooks()
    loop.block([0], hooks)
    assert len(hooks.numbers) == TINY.clients * TINY.steps * len(loop.trained[0])
    assert {len(numbers) for numbers in hooks.numbers} == {5 + BINS}
    loop.block([1], None)
    assert len(hooks.numbers) == TINY.clients * TINY.steps * len(loop.trained[0])


def test_verdicts_go_by_the_interval():
    off = [Spent(1.0, 1.0)] * 5
    verdicts = {}
    for bar in (1.0, 4.0, 9.0):
        watched = [Spent(1.0, 1.0 + x) for x in (0.02, 0.02, 0.05, 0.08, 0.08)]
        verdicts[bar] = row_of("", watched, off, bar)["verdict"]
    assert verdicts == {1.0: "missed", 4.0: "open", 9.0: "met"}
    assert percent_over([2.0, 2.0], [1.0, 1.0]) == (100.0, 100.0, 100.0)


def test_models_have_the_sizes_that_are_told():
    with torch.device("meta"):
        counts = {case.name: sum(p.numel() for p in case.make().parameters()) for case in CASES}
    assert counts["GPT"] == pytest.approx(110e6, rel=0.01)
    assert counts["GPT in bfloat16"] == pytest.approx(1e9, rel=0.03)


def test_the_same_comparison_on_a_cpu():
    rows = [row for part in ("llm", "others") for row in language_model_rows(part, 2, lambda _: None, tiny(), TINY)]
    assert {row["by"].split(":")[0] for row in rows} == {"standard", "hooks like Cockpit's", "wandb.watch"}
    assert all("overhead_percent" in row or "not measured" in row["by"] for row in rows)


def test_a_row_is_judged_by_its_interval_where_it_has_a_bar():
    rows = [{"model": "demo", "by": by, "low": 5.0, "high": 6.5} for by in ("standard with scale", "standard")]
    with_bar, without = _judged("rounds", rows)
    assert (with_bar["bar_percent"], with_bar["verdict"]) == (6.0, "open")
    assert "verdict" not in without
