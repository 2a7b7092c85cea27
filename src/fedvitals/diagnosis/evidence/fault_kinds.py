# SPDX-License-Identifier: Apache-2.0
"""The kinds of client faults that the evidence distinguishes, with the issue and the wording of each."""

from __future__ import annotations

ISSUE_OF = {
    "label_noise": "LABEL_NOISE",
    "label_flip": "LABEL_FLIP",
    "input_noise": "INPUT_NOISE",
    "input_scale": "INPUT_SCALE",
    "wrong_learning_rate": "WRONG_LEARNING_RATE",
    "stale_update": "STALE_UPDATE",
    "free_rider": "FREE_RIDER",
    "duplicate": "DUPLICATE_UPDATE",
    "sign_flip": "BYZANTINE",
    "scaling": "BYZANTINE",
    "gaussian": "BYZANTINE",
    "little_is_enough": "BYZANTINE",
    "inner_product": "BYZANTINE",
}

WORDS = {
    "label_noise": "random wrong labels",
    "label_flip": "one class labelled as another",
    "input_noise": "noisy inputs",
    "input_scale": "inputs on another scale",
    "wrong_learning_rate": "a learning rate of its own",
    "stale_update": "an update from an old model",
    "free_rider": "the server's last step, sent again",
    "duplicate": "a copy of another client's update",
    "sign_flip": "an update with its sign turned",
    "scaling": "a scaled update",
    "gaussian": "noise instead of, or on top of, its update",
    "little_is_enough": "an update shaped to hide among the others",
    "inner_product": "the others' mean, turned round",
}

# What is done to an update after it was trained: what the client trained says nothing of it.
AFTER_TRAINING = frozenset(
    {"stale_update", "free_rider", "duplicate", "sign_flip", "scaling", "gaussian", "little_is_enough", "inner_product"}
)
