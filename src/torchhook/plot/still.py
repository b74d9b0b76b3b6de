"""A figure that a notebook shows by itself, whether or not pyplot was imported."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class Still(Figure):
    """A figure that belongs to nobody but who holds it: pyplot does not know it, so there is nothing to close."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()
