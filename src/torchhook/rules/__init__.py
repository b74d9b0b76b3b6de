"""Judges a model: the rules, `diagnose` and `check`, profiles, and the origin of a NaN.

Each rule has a code, like those of a linter: TH1 nonfinite values, TH2 units, TH3 initialisation, TH4 gradients,
TH5 updates, TH6 losses, TH7 batch norms and modes, TH8 representations, TH9 drift.
"""

from torchhook.rules.families import (  # noqa: F401 (to register them)
    drift,
    gradients,
    initial,
    loop,
    losses,
    nonfinite,
    norms,
    ranks,
    representation,
    targets,
    units,
    updates,
)
from torchhook.rules.history import History
from torchhook.rules.registry import RULES, chosen, register
from torchhook.rules.rule import Need, Rule

__all__ = ["RULES", "History", "Need", "Rule", "chosen", "register"]
