# SPDX-License-Identifier: Apache-2.0
"""fedvitals on Flower against its bars: what it costs, how many lines it needs, whether it names what was planted."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedvitals_studies.bench.flower.cost import MODELS, measured
from fedvitals_studies.flower.app_folder import IMPORT, write_app
from fedvitals_studies.flower.digits_app.task import new_model
from fedvitals_studies.flower.planted_faults import ISSUES, SEEDS, Plant, PlantedRun, run_plant
from fedvitals_studies.flower.simulation import FlowerError, SuperLink

Row = dict[str, Any]
Tell = Callable[[str], None]

PARTS = ("lines", "cnn", "large", "faults")
BAR_OVERHEAD, BAR_BYTES = 3.0, 1.0  # per cent
LARGE = 1_000_000  # parameters from which the bar on bytes applies
QUICK = (Plant("nan"), Plant("none"))


def bench_flower(
    *, quick: bool = False, tell: Tell = lambda _: None, only: Collection[str] = (), stores: Path | None = None
) -> list[Row]:
    """A row for each bar. `only`: some of PARTS. `stores`: where the runs of the faults are kept."""
    parts = [part for part in PARTS if not only or part in only]
    rows: list[Row] = []
    with TemporaryDirectory(prefix="fv") as made:
        folder = Path(made)
        if "lines" in parts:
            rows.append(_lines(folder))
        for model in MODELS:
            if model in parts:
                rows += _cost(model, folder, quick, tell)
        if "faults" in parts:
            rows += _faults(folder, QUICK if quick else plants(), stores or folder / "stores", tell)
    return rows


def plants() -> list[Plant]:
    """Return every fault, and none, with each seed."""
    return [Plant(fault, seed) for fault in ISSUES for seed in range(SEEDS)]


def _row(what: str, bar: str, measured: str, verdict: str, details: Any = (), **numbers: float) -> Row:
    return {"what": what, "bar": bar, "measured": measured, "verdict": verdict, **numbers, "details": details}


def _met(met: bool) -> str:
    return "met" if met else "missed"


# -- what a user writes -----------------------------------------------------------------------------------------------


def _lines(folder: Path) -> Row:
    """Compare the app as it is with the same app using fedvitals."""
    plain, watched = (write_app(folder / f"lines-{kind or 'plain'}", kind) for kind in ("", "two-lines"))
    added = []
    for file in sorted((plain / "patient").glob("*.py")):
        other = watched / "patient" / file.name
        before, after = (one.read_text(encoding="utf-8").splitlines(keepends=True) for one in (file, other))
        added += [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    imports = sum(line == IMPORT for line in added)
    count = len(added) - imports
    measured = f"{count}, and {imports} imports; 0 with `fedvitals flower run`"
    return _row("lines that a user changes", "2, or 0", measured, _met(count == 2), added, value=count)


# -- what it costs ----------------------------------------------------------------------------------------------------


def _cost(model: str, folder: Path, quick: bool, tell: Tell) -> list[Row]:
    found = measured(model, folder, quick=quick, tell=tell)
    parameters = sum(tensor.numel() for tensor in new_model(model, 0).parameters())
    rows = []
    for what, (key, low_key, high_key), unit in (
        ("round time", ("overhead_percent", "low", "high"), "round_seconds"),
        ("processors' time of a round", ("cpu_percent", "cpu_low", "cpu_high"), "round_cpu_seconds"),
    ):
        percent, low, high = found[key], found[low_key], found[high_key]
        text = f"{percent:.2f} % ({low:.2f} to {high:.2f}) of {found[unit]:.2f} s, {found['pairs']} pairs"
        # An interval on both sides of the bar decides nothing, whatever its middle.
        verdict = "met" if high <= BAR_OVERHEAD else "missed" if low > BAR_OVERHEAD else "open"
        title = f"{what} with over without, simulation, {model} ({parameters:,} parameters)"
        rows.append(_row(title, f"≤ {BAR_OVERHEAD:g} %", text, verdict, found, value=percent, low=low, high=high))
    share = found["letter_percent"]
    said = f"{share:.3f} %: {found['letter_bytes']:,} of {found['update_bytes']:,} bytes"
    if parameters > LARGE:
        what = f"telemetry over the update that it rides with, {model}"
        rows.append(_row(what, f"≤ {BAR_BYTES:g} %", said, _met(share <= BAR_BYTES), value=share))
    return rows


# -- what it names ----------------------------------------------------------------------------------------------------


def _faults(folder: Path, chosen: Sequence[Plant], stores: Path, tell: Tell) -> list[Row]:
    stores.mkdir(parents=True, exist_ok=True)
    app = write_app(folder / "app", "two-lines")
    said: list[PlantedRun] = []
    failed: list[str] = []
    with SuperLink() as link:
        for number, plant in enumerate(chosen, 1):
            tell(f"{number} of {len(chosen)}: {plant.fault}, seed {plant.seed}")
            try:
                said.append(run_plant(link, app, plant, stores / f"{plant.name}.db"))
            except FlowerError as error:
                failed.append(f"{plant.name}: {error}")
                tell(str(error).splitlines()[0])
            else:
                tell(f"  {'right' if said[-1].right else 'WRONG'}: {'; '.join(said[-1].cases) or 'nothing found'}")
    rows = [_named(fault, said, [p for p in chosen if p.fault == fault]) for fault in ISSUES]
    return [row for row in rows if row is not None] + [_joined(said, failed)]


def _named(fault: str, runs: Sequence[PlantedRun], chosen: Sequence[Plant]) -> Row | None:
    if not chosen:
        return None
    own = [one for one in runs if one.plant.fault == fault]
    right = sum(one.right for one in own)
    what = "runs without a fault that give no finding" if fault == "none" else f"planted in simulation: {fault}, named"
    details = [{"run": one.plant.name, "right": one.right, "node": one.node, "said": one.cases} for one in own]
    measured = f"{right} of {len(chosen)}"
    return _row(what, f"{len(chosen)} of {len(chosen)}", measured, _met(right == len(chosen)), details, value=right)


def _joined(runs: Sequence[PlantedRun], failed: Sequence[str]) -> Row:
    answered, joined = sum(one.answered for one in runs), sum(one.joined for one in runs)
    missing = [f"{one.plant.name}: {name}" for one in runs for name in one.missing]
    measured = f"{joined} of {answered}" + (f"; {len(failed)} runs failed" if failed else "")
    met = answered > 0 and joined == answered and not failed
    what = "client spans joined to their round, of those that answered"
    return _row(what, "100 %", measured, _met(met), {"missing": missing, "failed": failed}, value=joined)
