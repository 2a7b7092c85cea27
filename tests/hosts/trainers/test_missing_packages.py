# SPDX-License-Identifier: Apache-2.0
"""Without the trainer's package: a sentence that says what to install."""

import sys

import pytest

import fedvitals as fv
from fedvitals.errors import MissingExtraError


@pytest.mark.parametrize(
    ("name", "packages"), [("huggingface", ["transformers"]), ("lightning", ["lightning.pytorch", "pytorch_lightning"])]
)
def test_the_extra_is_named(monkeypatch, name, packages):
    for module in [module for module in sys.modules if module.startswith(f"fedvitals.hosts.{name}")]:
        monkeypatch.delitem(sys.modules, module)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(vars(fv), name, raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install 'fedvitals\[{name}\]'"):
        getattr(fv, name)
