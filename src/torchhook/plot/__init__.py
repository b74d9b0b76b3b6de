"""Stills of what was seen inside a model: each function draws plain data with matplotlib and returns the figure.

Each draws into `ax` if it is given one, else into a figure of its own, which a notebook shows; none needs a display.
matplotlib is imported when the first one is drawn: ``pip install "torchhook[plot]"``.
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
