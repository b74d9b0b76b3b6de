"""A figure that a notebook shows whether or not pyplot was imported."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class Still(Figure):
    """A figure that pyplot does not know, so that it need not be closed."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()
