"""Rules: what can be wrong with a model, each with a code, as those of a linter.

TH1 not finite, TH2 units, TH3 beginnings, TH4 gradients, TH5 updates, TH6 losses, TH7 batch norms and modes,
TH8 representations, TH9 drift.
"""

from torchhook.rules.families import (  # noqa: F401 (to register them)
    drift,
    gradients,
    initial,
    losses,
    nonfinite,
    norms,
    representation,
    units,
    updates,
)
from torchhook.rules.history import History
from torchhook.rules.registry import RULES, chosen, register
from torchhook.rules.rule import Need, Rule

__all__ = ["RULES", "History", "Need", "Rule", "chosen", "register"]
