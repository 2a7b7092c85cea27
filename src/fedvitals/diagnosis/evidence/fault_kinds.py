# SPDX-License-Identifier: Apache-2.0
"""The kinds of client faults that the evidence distinguishes, with the issue and the wording of each."""

from __future__ import annotations

_KINDS = {
    "label_noise": ("LABEL_NOISE", "random wrong labels"),
    "label_flip": ("LABEL_FLIP", "one class labelled as another"),
    "input_noise": ("INPUT_NOISE", "noisy inputs"),
    "input_scale": ("INPUT_SCALE", "inputs on another scale"),
    "input_constant": ("UNUSUAL_CLIENT", "features that do not vary"),
    "input_missing": ("MISSING_VALUES", "missing inputs"),
    "input_repeated": ("UNUSUAL_CLIENT", "repeated samples"),
    "wrong_learning_rate": ("WRONG_LEARNING_RATE", "a learning rate of its own"),
    "stale_update": ("STALE_UPDATE", "an update from an old model"),
    "free_rider": ("FREE_RIDER", "the server's last step, sent again"),
    "duplicate": ("DUPLICATE_UPDATE", "a copy of another client's update"),
    "sign_flip": ("BYZANTINE", "an update with its sign flipped"),
    "scaling": ("BYZANTINE", "a scaled update"),
    "gaussian": ("BYZANTINE", "noise instead of, or on top of, its update"),
    "little_is_enough": ("BYZANTINE", "an update shaped to hide among the others"),
    "inner_product": ("BYZANTINE", "the others' mean, turned round"),
    "backdoor": ("BYZANTINE", "a trigger that is trained in"),
}
ISSUE_OF = {kind: issue for kind, (issue, _) in _KINDS.items()}
WORDS = {kind: words for kind, (_, words) in _KINDS.items()}
# What is done to an update after training: the client's telemetry of its training says nothing about it.
AFTER_TRAINING = frozenset(
    {"stale_update", "free_rider", "duplicate", "sign_flip", "scaling", "gaussian", "little_is_enough", "inner_product"}
)
INPUT_FAULTS = frozenset({"input_noise", "input_scale"})
DATA_FAULTS = INPUT_FAULTS | {"label_noise", "label_flip"}
FAMILY_OF = {
    **dict.fromkeys(_KINDS, "update"),
    **dict.fromkeys(("label_noise", "label_flip"), "labels"),
    **dict.fromkeys((*INPUT_FAULTS, "input_constant", "input_missing", "input_repeated"), "inputs"),
    "wrong_learning_rate": "training",
}
MULTIPLES = frozenset({"sign_flip", "scaling"})  # of what was trained: recognised exactly if sums can be compared
