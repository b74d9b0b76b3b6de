"""Plots with matplotlib: each function draws plain data and returns the figure.

It draws into `ax` if that is given, otherwise into a new figure, which a notebook shows. No display is needed.
matplotlib is imported when the first plot is drawn: ``pip install "torchhook[plot]"``.
"""

from torchhook.plot.images import attention, cam, feature_maps
from torchhook.plot.layers import gradient_flow, layer_heatmap
from torchhook.plot.matrices import similarity
from torchhook.plot.spread import distributions
from torchhook.plot.sweeps import sweep

__all__ = [
    "attention",
    "cam",
    "distributions",
    "feature_maps",
    "gradient_flow",
    "layer_heatmap",
    "similarity",
    "sweep",
]
