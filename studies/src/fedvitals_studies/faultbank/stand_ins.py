# SPDX-License-Identifier: Apache-2.0
"""Adds what a bank's cases use from packages that a borrowed machine lacks to its pack, under their names.

From scikit-learn the digits and the tables, which are data; from Opacus the accountant's file, which is pure Python.
Its function for sampled cohorts needs SciPy and is missing: cases with noise at the server ask all clients.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import numpy as np

from fedvitals.errors import ConfigError
from fedvitals.lab.data.small import Digits
from fedvitals.lab.data.tabular import Tabular
from fedvitals_studies.faultbank.cases import Bank

TABLES = '''"""Tables of scikit-learn, as arrays."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np


def __getattr__(name):
    path = Path(__file__).parent / f"{name}.npz"
    if not name.startswith("load_") or not path.exists():
        raise AttributeError(name)
    with np.load(path) as file:
        found = SimpleNamespace(data=file["data"], target=file["target"])
    return lambda: found
'''


def bring_stand_ins(bank: Bank, code: Path) -> None:
    """Add the stand-ins to a pack's code folder, as far as the bank's cases need them."""
    experiments = [case.experiment for case in bank.faulty]
    tables = {str(e.dataset.name) for e in experiments if isinstance(e.dataset, Tabular)}
    if tables or any(isinstance(e.dataset, Digits) for e in experiments):
        _bring_data(code / "sklearn" / "datasets", tables)
    if any(e.privacy is not None and e.privacy.noise for e in experiments):
        _bring_accountant(code / "opacus" / "accountants" / "analysis")


def _bring_data(folder: Path, tables: set[str]) -> None:
    from sklearn import datasets  # noqa: PLC0415 - an extra, and slow

    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder.parent / "__init__.py").write_text('"""The data of scikit-learn."""\n', encoding="utf-8")
    (folder / "__init__.py").write_text(TABLES, encoding="utf-8")
    digits = Path(datasets.__file__).parent / "data" / "digits.csv.gz"
    shutil.copyfile(digits, folder / "data" / digits.name)
    for name in tables:
        table = getattr(datasets, f"load_{name}")()
        np.savez(folder / f"load_{name}.npz", data=table.data, target=table.target)


def _bring_accountant(folder: Path) -> None:
    found = importlib.util.find_spec("opacus")
    if found is None or found.origin is None:
        raise ConfigError("Opacus is not installed, whose accountant the pack needs: pip install 'fedvitals[privacy]'.")
    source = Path(found.origin).parent / "accountants" / "analysis" / "rdp.py"
    folder.mkdir(parents=True, exist_ok=True)
    for package in (folder.parent.parent, folder.parent, folder):
        (package / "__init__.py").touch()
    text = source.read_text(encoding="utf-8").replace("from scipy import special\n", "")
    (folder / "rdp.py").write_text(text, encoding="utf-8")
