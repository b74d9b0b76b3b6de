"""Models, layers, inputs, data sets and domains against one another, by what happens inside.

torchhook.compare.cka(a, b, loader).matrix
torchhook.compare.datasets(model, train_loader, test_loader)
"""

from torchhook.compare.leaking import Leakage, leakage
from torchhook.compare.likeness import Likeness, cka
from torchhook.compare.shifting import Shift, shift
from torchhook.compare.spreads import Spreads, datasets, inputs, models

__all__ = [
    "Leakage",
    "Likeness",
    "Shift",
    "Spreads",
    "cka",
    "datasets",
    "inputs",
    "leakage",
    "models",
    "shift",
]
