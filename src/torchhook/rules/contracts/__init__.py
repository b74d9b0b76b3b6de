"""Contracts: properties that any correct model of its kind has; `torchhook.verify` checks them.

Each is used by name, as an object, or called with options: ``contracts.equivariant(flip)``. A contract of your own is a
function of a `Case`, which yields an `Agreement`, a `Breach`, a `Skip` or a `Note` for whatever it checks.
"""

from torchhook.rules.contracts.accumulation import accumulation
from torchhook.rules.contracts.caching import cached
from torchhook.rules.contracts.case import Agreement, Case, Variant
from torchhook.rules.contracts.contract import Breach, Contract, Note, Skip
from torchhook.rules.contracts.parameters import used
from torchhook.rules.contracts.randomness import deterministic
from torchhook.rules.contracts.samples import independent, shapes
from torchhook.rules.contracts.sequences import causal, padding
from torchhook.rules.contracts.switches import modes
from torchhook.rules.contracts.symmetries import equivariant

__all__ = [
    "Agreement",
    "Breach",
    "Case",
    "Contract",
    "Note",
    "Skip",
    "Variant",
    "accumulation",
    "cached",
    "causal",
    "deterministic",
    "equivariant",
    "independent",
    "modes",
    "padding",
    "shapes",
    "used",
]
