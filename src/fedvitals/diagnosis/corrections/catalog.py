# SPDX-License-Identifier: Apache-2.0
"""Which corrections help against each issue, the gentlest first. Only data: the host applies them.

| kind | target | arguments | meaning |
| --- | --- | --- | --- |
| exclude | client | | this round's update is left out |
| quarantine | client or group | | its updates are not used until it has been without a finding for a while |
| reweight | client | factor or samples | its share of the average |
| clip_gradients | | limit | each tensor's gradient is cut to this norm before the optimiser's step, on every client |
| clip_updates | | norm | each update is cut to this norm |
| stop_client_at_nonfinite | | | a client's local training ends at its first loss that is not finite; opt-in |
| client_rate, server_rate | | factor | of the learning rate |
| shorten_local_training | | factor | of the local iterations |
| robust_aggregator | | rule, and its own | in place of the average |
| roll_back | | restore | the model as it was after that round; any other kind may carry `restore` as well |
| resample | | | another cohort in the next round |
| advise | | text | for people |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.errors import ConfigError
from fedvitals.protocols import Correction, History
from fedvitals.records import Action, Finding

CLIENT_KINDS = ("quarantine", "reweight")  # of one client, and only for a time
RUN_KINDS = (
    "clip_gradients",
    "clip_updates",
    "stop_client_at_nonfinite",
    "client_rate",
    "server_rate",
    "shorten_local_training",
    "robust_aggregator",
    "roll_back",
    "resample",
)
KINDS = ("exclude", *CLIENT_KINDS, *RUN_KINDS, "advise")
OPT_IN_KINDS = ("stop_client_at_nonfinite",)
ONE_ROUND_KINDS = ("roll_back", "resample")  # done once, rather than in force over several rounds
# Kinds that may be in force more than once, because their factors multiply.
CUMULATIVE_KINDS = ("client_rate", "server_rate", "shorten_local_training")

PAPERS_CLIPPING = 1.0  # norm of each tensor, as in the study that this project continues
UPDATE_ROOM = 2.0  # how many times the median length an update may have


def finding_label(finding: Finding) -> str:
    """Return the label by which an action names its finding: the issue, and the client or group if there is one."""
    suspect = suspect_of(finding)
    return finding.issue if suspect is None else f"{finding.issue} {suspect}"


def suspect_of(finding: Finding) -> str | None:
    """Return the client or group that a finding is about; None for the run as a whole."""
    if finding.where.node not in (None, "server"):
        return finding.where.node
    if finding.where.group is not None:
        return finding.where.group
    return finding.suspects[0].node if len(finding.suspects) == 1 else None


def target_of(action: Action, allowed: str) -> str:
    """Return an action's target. Raises ConfigError, naming what is `allowed`, if it has none."""
    if action.target is None:
        raise ConfigError(f"'{action.kind}' needs a target: {allowed}.")
    return action.target


def positive_argument(action: Action, name: str) -> float:
    """Return a number of an action's arguments. Raises ConfigError unless it is finite and above 0."""
    value = action.arguments.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"'{action.kind}' needs '{name}', finite and above 0; got {value!r}.")
    return float(value)


def _action(finding: Finding, kind: str, target: str | None = None, **arguments: Any) -> Action:
    return Action(finding.where, finding.at, finding_label(finding), kind, target, arguments)


def _on_suspect(kind: str, **arguments: Any) -> Correction:
    """Return a correction of the client or group that a finding is about; None for a finding about the whole run."""

    def correction(finding: Finding, history: History) -> Action | None:  # noqa: ARG001 - a correction's signature
        suspect = suspect_of(finding)
        return None if suspect is None else _action(finding, kind, suspect, **arguments)

    return correction


def _on_run(kind: str, **arguments: Any) -> Correction:
    """Return a correction of the whole run."""

    def correction(finding: Finding, history: History) -> Action | None:  # noqa: ARG001
        return _action(finding, kind, **arguments)

    return correction


exclude, quarantine = _on_suspect("exclude"), _on_suspect("quarantine")
halve_weight = _on_suspect("reweight", factor=0.5)
clip_gradients = _on_run("clip_gradients", limit=PAPERS_CLIPPING)
stop_client_at_nonfinite = _on_run("stop_client_at_nonfinite")
trimmed_mean = _on_run("robust_aggregator", rule="trimmed_mean", fraction=0.2)
roll_back = _on_run("roll_back")  # CorrectionTrials fills in the round to restore, from the trend of the loss
resample = _on_run("resample")
server_slower, server_faster = _on_run("server_rate", factor=0.3), _on_run("server_rate", factor=4.0)
client_slower = _on_run("client_rate", factor=0.3)
shorter = _on_run("shorten_local_training", factor=0.5)


def weigh_like_others(finding: Finding, history: History) -> Action | None:
    """Give the suspect the weight of a median client, or half of its own if claimed sample counts are unknown."""
    suspect = suspect_of(finding)
    claimed = history.latest("update.samples", finding.where.round or 0)
    others = [value for node, value in claimed.items() if node != suspect and math.isfinite(value)]
    if suspect is None or not others:
        return halve_weight(finding, history)
    return _action(finding, "reweight", suspect, samples=max(1, round(float(np.median(others)))))


def clip_updates(finding: Finding, history: History) -> Action | None:
    """Clip updates to a little more than the norm that was usual before the problem began."""
    since = int(finding.evidence.get("since", finding.where.round or 0))
    rounds = [round_index for round_index in history.rounds()[-20:] if round_index <= since]
    norms = [norm for round_index in rounds for norm in history.latest("update.norm", round_index).values()]
    usual = [norm for norm in norms if math.isfinite(norm) and norm > 0]
    return _action(finding, "clip_updates", norm=UPDATE_ROOM * float(np.median(usual))) if usual else None


def advise(finding: Finding, history: History) -> Action | None:  # noqa: ARG001
    """Return the issue's remedies as text for people."""
    known = ISSUES_BY_CODE.get(finding.issue)
    remedies = () if known is None else known.remedies
    text = " ".join(remedies) or "No correction is known: look at the numbers of the finding."
    return _action(finding, "advise", suspect_of(finding), text=text)


_OF_ONE_CLIENT = (quarantine, trimmed_mean, advise)
_OF_DATA = (quarantine, halve_weight, trimmed_mean, advise)  # if exclusion costs too much, half may help
CORRECTIONS: dict[str, tuple[Correction, ...]] = {
    "DIVERGENCE": (server_slower, client_slower, clip_gradients, trimmed_mean, advise),
    "OSCILLATION": (server_slower, client_slower, shorter, advise),
    "SLOW_PROGRESS": (server_faster, advise),
    "PLATEAU": (server_faster, client_slower, advise),
    "OVERFITTING": (shorter, advise),
    "CLIENT_DRIFT": (shorter, client_slower, advise),
    **dict.fromkeys(("LABEL_NOISE", "LABEL_FLIP", "INPUT_NOISE", "INPUT_SCALE", "MISSING_VALUES"), _OF_DATA),
    **dict.fromkeys(("BYZANTINE", "STALE_UPDATE", "FREE_RIDER"), _OF_ONE_CLIENT),
    **dict.fromkeys(("WRONG_LEARNING_RATE", "FROZEN_LAYER", "UNUSUAL_CLIENT"), _OF_ONE_CLIENT),
    "MISSING_CLASSES": (advise,),  # legitimate data, however rare: excluding it would do the harm
    "DUPLICATE_UPDATE": (halve_weight, advise),  # it is unknown which client copied
    "WRONG_SAMPLE_COUNT": (weigh_like_others, quarantine, advise),
    "NAN_WEIGHTS": (roll_back, clip_gradients, client_slower, advise),
    "NAN_UPDATE": (exclude, stop_client_at_nonfinite, advise),
    "WEIGHT_EXPLOSION": (clip_updates, server_slower, clip_gradients, advise),
    "GROUP_LEFT_BEHIND": (advise,),
    "DOMINANT_CLIENT": (weigh_like_others, advise),
    "BATCH_NORM_STATISTICS": (quarantine, advise),
    **dict.fromkeys(("NOTHING_AGGREGATED", "ZERO_TOTAL_WEIGHT"), (resample, advise)),
    "SHAPE_OR_DTYPE_MISMATCH": (exclude, advise),
    "NAN_GRADIENT": (clip_gradients, client_slower, stop_client_at_nonfinite, advise),
    "FORGETTING": (client_slower, shorter, advise),
    "LOSS_SPIKE": (roll_back, clip_gradients, client_slower, advise),
    "ADAPTER_AGGREGATION_BIAS": (shorter, advise),
    "EXPLODING_GRADIENT": (clip_gradients, client_slower, shorter, advise),
}
"""What is not here is for people alone: no setting of a running training mends an architecture or a full disk."""


def corrections_for(finding: Finding, history: History) -> Sequence[Action]:
    """Return every correction that may answer the finding, in the order in which they are worth trying."""
    actions = (correction(finding, history) for correction in CORRECTIONS.get(finding.issue, (advise,)))
    return [action for action in actions if action is not None]
