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
    from torchhook import distributed as distributed
    from torchhook import edits as edits
    from torchhook.editing import arm, clip_gradients, edit, skip
    from torchhook.extractor import FeatureExtractor
    from torchhook.inventory import HookInfo, detach, hooks
    from torchhook.manager import HookManager
    from torchhook.measured import Stats
    from torchhook.measuring import measure
    from torchhook.sinks.reduce import Reduce
    from torchhook.stats import Channels, Covariance, Histogram, Moments, Quantiles, Stat, TopK
    from torchhook.stats.reading import Reading, Snapshot
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
    "Channels": "stats",
    "Covariance": "stats",
    "FeatureExtractor": "extractor",
    "Histogram": "stats",
    "HookInfo": "inventory",
    "HookManager": "manager",
    "Moments": "stats",
    "Quantiles": "stats",
    "Reading": "stats.reading",
    "Reduce": "sinks.reduce",
    "Snapshot": "stats.reading",
    "Stat": "stats",
    "Stats": "measured",
    "Sweep": "sweeping",
    "TopK": "stats",
    "arm": "editing",
    "clip_gradients": "editing",
    "count_parameters": "summary",
    "detach": "inventory",
    "edit": "editing",
    "format_parameter_count": "summary",
    "get_layerwise_parameter_count": "summary",
    "hooks": "inventory",
    "measure": "measuring",
    "model_summary": "summary",
    "skip": "editing",
    "sweep": "sweeping",
}

_PACKAGES = ("distributed", "edits")

__all__ = [
    "BudgetError",
    "Calls",
    "Capture",
    "Channels",
    "Covariance",
    "Edit",
    "Event",
    "FeatureExtractor",
    "Histogram",
    "HookInfo",
    "HookManager",
    "Moments",
    "NotRecordedError",
    "OverwrittenError",
    "Quantiles",
    "Reading",
    "Record",
    "Reduce",
    "Ring",
    "SelectionError",
    "Selector",
    "Session",
    "SessionError",
    "SilentError",
    "Sink",
    "Site",
    "Snapshot",
    "Stat",
    "Stats",
    "Store",
    "Sweep",
    "Tap",
    "TapError",
    "TopK",
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
    "measure",
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
    if name in _PACKAGES:
        return import_module(f"torchhook.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'torchhook' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"torchhook.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES]
