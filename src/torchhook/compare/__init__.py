"""Compare models, layers, inputs, data sets and domains by what happens inside the models.

torchhook.compare.cka(a, b, loader).matrix
torchhook.compare.datasets(model, train_loader, test_loader)
"""

from torchhook.compare.distributions import Spreads, datasets, inputs, models
from torchhook.compare.domain_shift import Shift, Shifts, shift
from torchhook.compare.likeness import Likeness, cka
from torchhook.compare.membership import Leakage, leakage

__all__ = [
    "Leakage",
    "Likeness",
    "Shift",
    "Shifts",
    "Spreads",
    "cka",
    "datasets",
    "inputs",
    "leakage",
    "models",
    "shift",
]
