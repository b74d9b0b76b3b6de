"""See, record, change and diagnose what happens inside a PyTorch model.

with torchhook.capture(model, "layer4.*", nn.ReLU, grads=True) as acts:
    model(x).sum().backward()
acts["layer4.1"].output, acts["layer4.1"].grad
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchhook.api import capture, overhead, trace
from torchhook.captured import Calls, Capture
from torchhook.core.edit import Edit
from torchhook.core.event import Event
from torchhook.core.marks import mark
from torchhook.core.selection import Selector, glob, marked, of_type, regex, select
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.tap import Sink, Tap, every, first, sample
from torchhook.errors import (
    BudgetError,
    NotRecordedError,
    OverwrittenError,
    SelectionError,
    SessionError,
    SilentError,
    TapError,
    TorchhookError,
)
from torchhook.sinks.memory import Record, Ring
from torchhook.sinks.store import Store

if TYPE_CHECKING:
    from torchhook import edits as edits
    from torchhook.editing import arm, clip_gradients, edit, skip
    from torchhook.extractor import FeatureExtractor
    from torchhook.inventory import HookInfo, detach, hooks
    from torchhook.manager import HookManager
    from torchhook.summary import (
        count_parameters,
        format_parameter_count,
        get_layerwise_parameter_count,
        model_summary,
    )
    from torchhook.sweeping import Sweep, sweep

__version__ = "1.0.0.dev0"

# Where the names are that not everybody needs: importing the package stays quick.
_LATER = {
    "FeatureExtractor": "extractor",
    "HookInfo": "inventory",
    "HookManager": "manager",
    "Sweep": "sweeping",
    "arm": "editing",
    "clip_gradients": "editing",
    "count_parameters": "summary",
    "detach": "inventory",
    "edit": "editing",
    "format_parameter_count": "summary",
    "get_layerwise_parameter_count": "summary",
    "hooks": "inventory",
    "model_summary": "summary",
    "skip": "editing",
    "sweep": "sweeping",
}

__all__ = [
    "BudgetError",
    "Calls",
    "Capture",
    "Edit",
    "Event",
    "FeatureExtractor",
    "HookInfo",
    "HookManager",
    "NotRecordedError",
    "OverwrittenError",
    "Record",
    "Ring",
    "SelectionError",
    "Selector",
    "Session",
    "SessionError",
    "SilentError",
    "Sink",
    "Site",
    "Store",
    "Sweep",
    "Tap",
    "TapError",
    "TorchhookError",
    "arm",
    "capture",
    "clip_gradients",
    "count_parameters",
    "detach",
    "edit",
    "every",
    "first",
    "format_parameter_count",
    "get_layerwise_parameter_count",
    "glob",
    "hooks",
    "mark",
    "marked",
    "model_summary",
    "of_type",
    "overhead",
    "regex",
    "sample",
    "select",
    "skip",
    "sweep",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name == "edits":
        return import_module("torchhook.edits")
    if name not in _LATER:
        raise AttributeError(f"module 'torchhook' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"torchhook.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "edits"]
