"""Plots with matplotlib: each function draws a result of another verb, or plain data, and returns the figure.

It draws into `ax` if that is given, otherwise into a new figure, which a notebook shows. No display is needed.
matplotlib is imported when the first plot is drawn: ``pip install "torchhook[plot]"``.
"""

from torchhook.plot.cams import cam
from torchhook.plot.images import attention, feature_maps
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
