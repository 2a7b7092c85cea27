# SPDX-License-Identifier: Apache-2.0
"""Which reading of the gradient scale's formula gives the order that the paper reports: all of them side by side.

`python -m fedvitals_studies.reproduce.gsc_readings FOLDER [--seeds 5] [--minutes 8]` trains the paper's CNN in its
three scenarios on a part of GTSRB, and measures GSC(k, l), equation 1, exactly or by 32 projections, with the possible
meanings of the paper's last and first layer. It continues where it was stopped; the page of the reproduction shows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fedvitals import lab
from fedvitals.probes.layer_scale import layer_scale
from fedvitals.probes.scale import gradient_scale
from fedvitals.report.markup import Table
from fedvitals_studies.reproduce import rows as rows_of_study
from fedvitals_studies.reproduce.conditions import SCENARIOS

FILE = "readings.json"
SEEDS = 5
IMAGES = 64
VISIBLE = 0.5  # orders of magnitude by which claim 4.3 distinguishes scenarios by eye
READINGS = {
    "logits by input: `scale.gsc`": "‖logits‖ / ‖input‖",
    "logits by input, numbered the other way: `scale.sensitivity`": "‖input‖ / ‖logits‖",
    "logits by the first activation": "‖logits‖ / ‖first activation‖",
    "softmax by input": "‖softmax‖ / ‖input‖",
    "loss by input": "|loss| / ‖input‖",
}


class _Loss(nn.Module):
    """A network whose output is the loss of each sample."""

    def __init__(self, network: nn.Module, labels: Tensor) -> None:
        super().__init__()
        self.network, self.labels = network, labels

    def forward(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(self.network(x), self.labels, reduction="none")[:, None]


def readings_of(network: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the mean over the samples of every reading, in the order of READINGS."""
    gsc, sensitivity = gradient_scale(network, x, exact=True)
    scales = (
        gsc,
        sensitivity,
        layer_scale(network, x, lower="activation1"),
        layer_scale(nn.Sequential(network, nn.Softmax(1)), x),
        layer_scale(_Loss(network, y), x),
    )
    # 0 over 0, as for a softmax that is certain beyond rounding: the input has no effect.
    return {name: float(each.nan_to_num(0.0).mean()) for name, each in zip(READINGS, scales, strict=True)}


def run(scenario: str, seed: int) -> dict[str, Any]:
    """Train the paper's centralized federation with 4 of its clients for 5 rounds. Returns all readings."""
    clip = lab.Clip(1.0) if scenario == "baseline" else None
    experiment = lab.Experiment(
        dataset=lab.gtsrb(samples=1252, test_samples=IMAGES),
        model=lab.paper_cnn(scenario=scenario),
        local=lab.Local(iterations=20, optimizer=lab.adam(1e-3), clip=clip),
        clients=4,
        rounds=5,
        seed=seed,
    )
    result = lab.run(experiment, None, engine="sequential")
    data = lab.Site.of(experiment).dataset
    x, y = data.inputs(data.test_x[:IMAGES]), data.test_y[:IMAGES]
    return {"scenario": scenario, "seed": seed, "readings": readings_of(result.model, x, y)}


def table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return every reading of the runs with all three scenarios, and the order that it gives."""
    by_seed: dict[int, dict[str, Mapping[str, float]]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], {})[row["scenario"]] = row["readings"]
    whole = [runs for runs in by_seed.values() if len(runs) == len(SCENARIOS)]
    if not whole:
        return None
    lines, ordered = [], []
    for name, norms in READINGS.items():
        levels = [[runs[scenario][name] for runs in whole] for scenario in SCENARIOS]
        above, below = (
            [_orders(a, b) for a, b in zip(first, second, strict=True)]
            for first, second in ((levels[1], levels[0]), (levels[0], levels[2]))
        )
        kept = sum(a >= VISIBLE and b >= VISIBLE for a, b in zip(above, below, strict=True))
        ordered += [name] if kept == len(whole) else []
        lines.append((name, norms, *map(_range, levels), _range(above), f"{kept} of {len(whole)}"))
    return Table(
        "Every reading of the gradient scale, side by side (4.2 to 4.4)",
        ("reading", "norms", *SCENARIOS, "orders, exploding over baseline", "reported order"),
        tuple(lines),
        "The reported order is exploding above baseline above vanishing, each by half an order of magnitude or more. "
        f"Readings that give it with every seed: {'; '.join(ordered) or 'none'}. Claims 4.1 to 4.3 and 4.5 to 4.8 are "
        "judged by `scale.gsc`, which gives it and numbers the layers as the paper's figures do. All are GSC(k, l) of "
        f"the paper's equation 1 with another top, bottom or numbering; {len(whole)} seeds, ranges over them, {IMAGES} "
        f"test images, the paper's CNN after 5 rounds of 4 clients with 313 images of GTSRB each.",
    )


def _orders(above: float, below: float) -> float:
    if not above:
        return 0.0 if not below else -math.inf
    return math.inf if not below else math.log10(above / below)


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    words = [("∞" if value > 0 else "−∞") if math.isinf(value) else f"{value:.2g}" for value in (low, high)]
    return words[0] if words[0] == words[1] else f"{words[0]} to {words[1]}"


def main() -> None:
    chosen = rows_of_study.options("All readings of the gradient scale, side by side.", seeds=SEEDS).parse_args()
    path = chosen.folder / FILE
    there = {(row["scenario"], row["seed"]) for row in rows_of_study.read(path)}
    wanted = [(s, n) for n in range(chosen.seeds) for s in SCENARIOS if (s, n) not in there]
    rows_of_study.go_on(path, wanted, run, chosen.minutes)


if __name__ == "__main__":
    main()
