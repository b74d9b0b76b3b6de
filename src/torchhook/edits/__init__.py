"""Edits: what can be done to a value on its way through a model.

Each returns an `Edit` for `torchhook.edit` or a `Tap`. Where the value is nested, ``at=`` says which tensor
is meant: a position or a name (``at=0``, ``at="hidden_states"``), or several of them on the way down.
"""

from torchhook.core.edit import Edit
from torchhook.edits.ablation import ablate
from torchhook.edits.basic import add, apply, clamp, noise, replace, scale, zero
from torchhook.edits.patching import patch

__all__ = ["Edit", "ablate", "add", "apply", "clamp", "noise", "patch", "replace", "scale", "zero"]
