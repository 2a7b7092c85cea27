# SPDX-License-Identifier: Apache-2.0
"""The notebooks of examples/notebooks run without a network, and their stored outputs are made as those of today."""

import pytest

for package in ("nbclient", "ipykernel", "matplotlib", "sklearn", "pandas"):
    pytest.importorskip(package, reason="notebooks need Jupyter's packages and the extras lab and plots")

nbformat = pytest.importorskip("nbformat")
notebooks = pytest.importorskip("documentation.notebooks")

NOTEBOOKS = sorted(notebooks.FOLDER.glob("*.ipynb"))
MOST_BYTES = 200_000


def test_three_notebooks_are_small_and_have_rich_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["diagnose", "first_run", "lora"]
    for path in NOTEBOOKS:
        assert path.stat().st_size <= MOST_BYTES, path
        kinds = [kind for cell in notebooks.structure(nbformat.read(path, as_version=4)) for kind in cell]
        assert any("image/png" in kind for kind in kinds), path
        assert any("text/html" in kind for kind in kinds), path
        assert not any(kind.startswith("error") for kind in kinds), path


@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_its_outputs_are_as_stored(path, monkeypatch):
    monkeypatch.delenv("FEDVITALS_STORE", raising=False)
    stored = notebooks.structure(nbformat.read(path, as_version=4))
    assert notebooks.structure(notebooks.run(path)) == stored, "renew them: scripts/docs notebooks"
