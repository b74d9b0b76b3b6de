"""Figures for pages: pure functions from plain data to a plotly figure, None when there is nothing to show.

plotly is imported when the first figure is drawn: ``pip install "torchhook[plot]"``.
"""

from torchhook.render.figures.layers import activations, gradient_flow, updates
from torchhook.render.figures.curves import loss_curve

__all__ = ["activations", "gradient_flow", "loss_curve", "updates"]
