"""Figures for reports and the dashboard: functions from plain data to a plotly figure.

Figures of a report are None if the report has nothing to show in them. plotly is imported when the first figure is
drawn: ``pip install "torchhook[plot]"``.
"""

from torchhook.render.figures.curves import curves, loss_curve, loss_curves, quantile_bands, update_curves
from torchhook.render.figures.heatmap import heatmap, heatmap_rows
from torchhook.render.figures.layers import activations, gradient_flow, layer_lines, updates
from torchhook.render.figures.style import layer_name, not_measured

__all__ = [
    "activations",
    "curves",
    "gradient_flow",
    "heatmap",
    "heatmap_rows",
    "layer_lines",
    "layer_name",
    "loss_curve",
    "loss_curves",
    "not_measured",
    "quantile_bands",
    "update_curves",
    "updates",
]
