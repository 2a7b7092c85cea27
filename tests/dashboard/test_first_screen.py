# SPDX-License-Identifier: Apache-2.0
"""A first-time reader finds culprit, cause and next step of eight stored runs on the first screen of each.

The words below were written down, and committed, before any run with these seeds was made (`git log` of this file:
first the words, then the seeds).
"""

import pytest

from support.dashboard_server import needs_browser, ready, serve
from support.stored_runs import RUNS, store_runs

pytestmark = [pytest.mark.browser, pytest.mark.thorough, needs_browser]
SEED = 52_800  # of the first run, the next ones follow; nobody looked at them while these words were written
SCREEN = {"width": 1440, "height": 900}

# Kind of run → who is at fault, what is wrong, and what to do first: words that must be in sight.
EXPECTED = {
    "nan": ("PROBLEM", "c5", "The model was lost in round 6", "NaN", "c2 also crashes since round 4",
            "Next step: Go back", "before round 6", "leave c5 out"),
    "label noise": ("PROBLEM", "c7", "wrong labels", "since round 4", "Next step: Check the samples",
                    "suspect_samples"),
    "straggler": ("PROBLEM", "c3", "slower than the others", "since round 3", "waited", "of their time", "Next step:",
                  "Speed up the client"),
    "rings": ("PROBLEM", "c4", "manipulated updates", "sign", "since round 4", "Next step: Leave the client out"),
    "crash": ("PROBLEM", "c1", "crashes", "RuntimeError", "since round 3", "Next step: Read the traceback"),
    "drift": ("PROBLEM", "Clients pull apart", "its own task", "Next step: Shorten local training"),
    "healthy": ("OK", "no finding", "all judged", "Nobody is suspected"),
    "lora": ("PROBLEM", "c6", "α/r", "since round 3", "Next step: Set α"),
}  # fmt: skip

# The text that is inside of the window and not hidden, read as a person does: from top to bottom.
IN_SIGHT = """() => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), words = [];
  const seen = { checkOpacity: true, checkVisibilityCSS: true };
  const inside = (box) => box.top >= 0 && box.bottom <= innerHeight && box.left >= 0 && box.right <= innerWidth;
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter((box) => box.width > 1 && box.height > 1);
    const whole = boxes.length && boxes.every(inside);
    if (whole && node.parentElement.checkVisibility(seen)) words.push(node.textContent);
  }
  return words.join(" ").replace(/\\s+/g, " ");
}"""


@pytest.fixture(scope="module")
def site(session_folder):
    path = session_folder / "eight.db"
    runs = store_runs(path, SEED)
    with serve(path) as url:
        yield url, runs


@pytest.mark.parametrize("kind", RUNS)
def test_culprit_cause_and_next_step_are_in_sight(site, page, kind):
    url, runs = site
    page.set_viewport_size(SCREEN)
    ready(page, f"{url}/runs/{runs[kind]}", "overview")
    words = page.evaluate(IN_SIGHT)
    missing = [expected for expected in EXPECTED[kind] if expected not in words]
    assert not missing, words
    if kind == "healthy":
        assert "Next step" not in words
