# SPDX-License-Identifier: Apache-2.0
"""The notebooks in examples/notebooks: run them in a kernel of their own, and say what their outputs are made of.

`scripts/docs notebooks` runs them again and keeps their new outputs. They need no network.
"""

from __future__ import annotations

import base64
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
COLOURS = 48  # of a picture
SECONDS = 300  # for one cell, on a machine with much else to do
_QUIET = {"OMP_NUM_THREADS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
_OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")  # downloads fail: none there


def run(path: Path) -> Any:
    """Run a notebook in an empty folder.

    Args:
        path: The notebook's file, which is not changed.

    Returns:
        The notebook with its new outputs. What a cell took, and who ran it, is left out.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"kernel_name": "python3", "resources": {"metadata": {"path": folder}}}
        client = NotebookClient(notebook, timeout=SECONDS, **settings)
        client.execute(env={**os.environ, **_QUIET, **_OFFLINE})
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            output.pop("metadata", None)
            if output.output_type in ("display_data", "execute_result"):
                output.metadata = {}
                if "image/png" in output.data:
                    output.data["image/png"] = _smaller(output.data["image/png"])
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def _smaller(picture: str) -> str:
    """Return a PNG, as base64, with few colours: a third of the bytes, and charts look the same."""
    written = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode("ascii")


def structure(notebook: Any) -> list[list[str]]:
    """Return what the outputs of each code cell are made of: their kinds, the columns of tables, and the words.

    Args:
        notebook: As nbformat reads it.
    """
    return [[_kind(output) for output in cell.outputs] for cell in notebook.cells if cell.cell_type == "code"]


def _kind(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.name)
    if output.output_type == "error":
        return f"error {output.ename}"
    html = "".join(output.data.get("text/html", ""))
    columns = [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<th[^>]*>(.*?)</th>", html, re.DOTALL)]
    titles = ", ".join(title for title in columns if title and not title.isdigit())
    text = "" if 'class="dataframe"' in html else output.data.get("text/plain", "")
    words = " ".join(re.sub(r"\d\S*", "", text).split())  # without numbers, which depend on the machine
    return f"{' '.join(sorted(output.data))} [{titles}] {words}"


def renew() -> None:
    """Run all notebooks and keep their new outputs."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(run(path), path)
        print(f"{path.name}  {path.stat().st_size / 1000:.0f} kB")
