"""Edits: ways to change a value as it flows through a model.

Each function returns an `Edit` for `torchhook.edit` or a `Tap`. If the value is nested, ``at=`` says which tensor
to edit: a position or a name (``at=0``, ``at="hidden_states"``), or a tuple of them for deeper nesting.
"""

from torchhook.core.edit import Edit
from torchhook.edits.ablation import ablate
from torchhook.edits.basic import add, apply, clamp, noise, replace, scale, zero
from torchhook.edits.patching import patch

__all__ = ["Edit", "ablate", "add", "apply", "clamp", "noise", "patch", "replace", "scale", "zero"]
