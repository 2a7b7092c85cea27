# SPDX-License-Identifier: Apache-2.0
"""A figure that a notebook displays by itself; matplotlib's own figures need pyplot for that."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

from fedvitals.plot.canvas import in_style


class NotebookFigure(Figure):
    """A matplotlib Figure that notebooks show as PNG."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        with in_style():
            self.savefig(picture, format="png", dpi=144)
        return picture.getvalue()
