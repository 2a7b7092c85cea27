# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer, and those that are made from it, such as TRL's: one line.

    Trainer(model, args, train_dataset=..., callbacks=[fv.huggingface.Callback("runs.db")])

See docs/trainers.md.
"""

from __future__ import annotations

from fedvitals.hosts.huggingface.callback import Callback

__all__ = ["Callback"]
