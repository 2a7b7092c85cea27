# SPDX-License-Identifier: Apache-2.0
"""A figure that a notebook shows by itself: matplotlib's own do so only where pyplot was loaded."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

from fedvitals.plot.canvas import in_style


class NotebookFigure(Figure):
    """matplotlib's Figure in all else: `savefig`, `axes` and the rest are its own."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        with in_style():
            self.savefig(picture, format="png", dpi=144)
        return picture.getvalue()
