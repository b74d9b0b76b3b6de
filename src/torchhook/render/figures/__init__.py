"""Figures for reports and the dashboard: functions from plain data to a plotly figure.

Figures of a report are None if the report has nothing to show in them. plotly is imported when the first figure is
drawn: ``pip install "torchhook[plot]"``.
"""

from torchhook.render.figures.curves import curves, distributions, loss_curve, loss_curves, smoothed, update_curves
from torchhook.render.figures.heatmap import Stretch, health_map, heatmap, heatmap_rows, spaced, step_range
from torchhook.render.figures.layers import activations, gradient_flow, layer_lines, updates
from torchhook.render.figures.style import layer_name, not_measured

__all__ = [
    "Stretch",
    "activations",
    "curves",
    "distributions",
    "gradient_flow",
    "health_map",
    "heatmap",
    "heatmap_rows",
    "layer_lines",
    "layer_name",
    "loss_curve",
    "loss_curves",
    "not_measured",
    "smoothed",
    "spaced",
    "step_range",
    "update_curves",
    "updates",
]
